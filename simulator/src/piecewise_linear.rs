//! Piecewise linear functions.

/// Piecewise linear function through given points.
#[derive(Debug, Clone, PartialEq)]
pub struct PiecewiseLinear {
    points: Vec<(f64, f64)>,
}

impl PiecewiseLinear {
    /// Creates the function through these points; points with equal x are averaged. `None` without points or
    /// if one is not finite.
    pub fn new(mut points: Vec<(f64, f64)>) -> Option<Self> {
        if points.is_empty() || points.iter().any(|(x, y)| !x.is_finite() || !y.is_finite()) {
            return None;
        }
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let merged = points.chunk_by(|a, b| a.0 == b.0).map(|same| {
            let sum: f64 = same.iter().map(|point| point.1).sum();
            (same[0].0, sum / same.len() as f64)
        });
        Some(Self { points: merged.collect() })
    }

    /// Evaluates the function at `x`: constant before the first point, extrapolated from the last two points
    /// beyond the last one.
    pub fn at(&self, x: f64) -> f64 {
        let behind = self.points.partition_point(|point| point.0 <= x);
        if behind == 0 {
            return self.points[0].1;
        }
        let upper = behind.min(self.points.len() - 1);
        let (x1, y1) = self.points[upper];
        if upper == 0 {
            return y1;
        }
        let (x0, y0) = self.points[upper - 1];
        y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    }
}

#[cfg(test)]
mod tests {
    use super::PiecewiseLinear;

    #[test]
    fn the_function_is_linear_between_and_beyond_its_points_and_flat_before() {
        let function = PiecewiseLinear::new(vec![(4.0, 8.0), (2.0, 1.0), (2.0, 3.0), (6.0, 9.0)]).unwrap();
        for (x, y) in [(0.0, 2.0), (2.0, 2.0), (3.0, 5.0), (4.0, 8.0), (6.0, 9.0), (10.0, 11.0)] {
            assert_eq!(function.at(x), y, "at {x}");
        }
        assert_eq!(PiecewiseLinear::new(vec![(1.0, 7.0)]).unwrap().at(5.0), 7.0);
        assert_eq!(PiecewiseLinear::new(Vec::new()), None);
        assert_eq!(PiecewiseLinear::new(vec![(f64::NAN, 1.0)]), None);
    }
}
