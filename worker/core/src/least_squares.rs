/// Observations at the start that never fade. They are the calibration's, chosen to tell the features apart, which what is
/// served later may not do for hours: in decode there are as many tokens as sequences.
const ANCHORED: u32 = 32;
/// What each of them weighs for ever, against 1 of a new one.
const ANCHOR: f64 = 0.1;

/// Least squares for a linear model of `N` features with exponential forgetting, a prior, and coefficients of at
/// least 0, kept up to date observation by observation.
///
/// It holds the normal equations (the information form of the recursion in Ljung, *System Identification*, 11.2) and
/// solves them anew each time: with so few features that costs well under a microsecond, and, unlike an updated
/// covariance, what is solved stays positive definite whatever comes. In `f64` and in fixed order, so that the same
/// observations give the same estimate everywhere.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquares<const N: usize> {
    estimate: [f64; N],
    fading: Normal<N>,
    lasting: Normal<N>,
    forgetting: f64,
    observed: u32,
}

/// Normal equations, `matrix * estimate = moment`.
#[derive(Debug, Clone, Copy)]
struct Normal<const N: usize> {
    matrix: [[f64; N]; N],
    moment: [f64; N],
}

impl<const N: usize> Normal<N> {
    const ZERO: Self = Self { matrix: [[0.0; N]; N], moment: [0.0; N] };

    fn add(&mut self, features: &[f64; N], value: f64, weight: f64) {
        for i in 0..N {
            for j in 0..N {
                self.matrix[i][j] += weight * features[i] * features[j];
            }
            self.moment[i] += weight * features[i] * value;
        }
    }
}

impl<const N: usize> LeastSquares<N> {
    /// Starts from a prior estimate. `trust` is the standard deviation, relative to each prior value, that the
    /// prior is believed to have; `forgetting` in (0, 1] is how much an observation weighs one observation later.
    pub fn new(prior: [f64; N], trust: f64, forgetting: f64) -> Self {
        let mut lasting = Normal::ZERO;
        for (i, value) in prior.iter().enumerate() {
            lasting.matrix[i][i] = (value.abs().max(1e-9) * trust).powi(-2);
            lasting.moment[i] = lasting.matrix[i][i] * value;
        }
        Self { estimate: prior, fading: Normal::ZERO, lasting, forgetting, observed: 0 }
    }

    /// Takes one observation with the given noise variance.
    pub fn observe(&mut self, features: &[f64; N], value: f64, noise: f64) {
        let weight = 1.0 / noise;
        if !(weight.is_finite() && weight > 0.0 && value.is_finite()) {
            return;
        }
        self.fading.matrix.iter_mut().flatten().for_each(|entry| *entry *= self.forgetting);
        self.fading.moment.iter_mut().for_each(|entry| *entry *= self.forgetting);
        self.fading.add(features, value, weight);
        if self.observed < ANCHORED {
            self.observed += 1;
            self.lasting.add(features, value, ANCHOR * weight);
        }
        self.solve();
    }

    /// The coefficients, none below 0: no part of a step takes negative time.
    pub fn coefficients(&self) -> [f64; N] {
        self.estimate
    }

    /// The prediction with those coefficients.
    pub fn predict(&self, features: &[f64; N]) -> f64 {
        self.estimate.iter().zip(features).map(|(coefficient, feature)| coefficient * feature).sum()
    }

    /// The best estimate without negative coefficients: while there is one, the most negative is held at 0 and the
    /// others are estimated again. So they take over what it stood for, which cutting it off would lose.
    fn solve(&mut self) {
        let mut held = [false; N];
        for _ in 0..=N {
            let Some(estimate) = self.solve_without(&held) else { return };
            // Coefficients differ in unit: what counts is how much of what was observed they explain.
            let share = |i: usize| estimate[i] * self.fading.matrix[i][i].sqrt();
            match (0..N).filter(|i| estimate[*i] < 0.0).min_by(|a, b| share(*a).total_cmp(&share(*b))) {
                Some(lowest) => held[lowest] = true,
                None => {
                    self.estimate = estimate;
                    return;
                }
            }
        }
    }

    /// Solves by Cholesky's method, with those `held` at 0. Nothing if rounding has made the matrix indefinite.
    fn solve_without(&self, held: &[bool; N]) -> Option<[f64; N]> {
        // Scaled to a diagonal of 1: a key's microseconds and a step's differ by eight orders of magnitude.
        let diagonal = |i: usize| self.fading.matrix[i][i] + self.lasting.matrix[i][i];
        let scale: [f64; N] = std::array::from_fn(|i| diagonal(i).sqrt().recip());
        let entry = |i: usize, j: usize| match held[i] || held[j] {
            true => f64::from(u8::from(i == j)),
            false => (self.fading.matrix[i][j] + self.lasting.matrix[i][j]) * scale[i] * scale[j],
        };
        let mut factor = [[0.0; N]; N];
        let mut solution = [0.0; N];
        for i in 0..N {
            for j in 0..=i {
                let sum = entry(i, j) - (0..j).map(|k| factor[i][k] * factor[j][k]).sum::<f64>();
                factor[i][j] = if i == j { sum.sqrt() } else { sum / factor[j][j] };
            }
            if !(factor[i][i].is_finite() && factor[i][i] > 0.0) {
                return None;
            }
            let moment = (self.fading.moment[i] + self.lasting.moment[i]) * scale[i];
            let moment = if held[i] { 0.0 } else { moment };
            solution[i] = (moment - (0..i).map(|k| factor[i][k] * solution[k]).sum::<f64>()) / factor[i][i];
        }
        for i in (0..N).rev() {
            let sum = solution[i] - (i + 1..N).map(|k| factor[k][i] * solution[k]).sum::<f64>();
            solution[i] = sum / factor[i][i];
        }
        Some(std::array::from_fn(|i| solution[i] * scale[i]))
    }
}
