//! Pool of something bounded that callers share: streams, bytes, connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Times of what is free that a holder of the highest weight may hold: alone, three quarters of the pool.
const SHARE: f64 = 3.0;

/// Bounded pool of which no named holder takes all: it may hold at most three times what is free then, over its weight relative to the
/// highest one among the holders (dynamic thresholds, Choudhury and Hahne, IEEE/ACM Trans. Networking 6, 1998). So a newcomer always
/// finds some, whatever the others do, and nothing is set aside for holders that are not there. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SharedPool(Arc<PoolState>);

#[derive(Debug)]
struct PoolState {
    most: u64,
    held: Mutex<HeldAmounts>,
}

#[derive(Debug, Default)]
struct HeldAmounts {
    total: u64,
    /// Amount and weight by holder; entries whose amount is 0 are removed.
    by_holder: BTreeMap<Arc<str>, (u64, f64)>,
}

/// Holder of a part of a pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Holder {
    /// Its name: a tenant.
    pub name: Arc<str>,
    /// Its fair-share weight, above 0.
    pub weight: f64,
}

/// The pool has not so much for this holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolFull {
    /// It has not so much at all.
    Pool,
    /// The holder has its share of what is left.
    Share,
}

/// Part of a pool, given back on drop.
#[derive(Debug)]
pub struct PoolShare {
    pool: SharedPool,
    holder: Option<Holder>,
    amount: u64,
}

impl SharedPool {
    /// Creates a pool of `most`.
    pub fn new(most: u64) -> Self {
        Self(Arc::new(PoolState { most, held: Mutex::default() }))
    }

    /// What the pool has in all.
    pub fn most(&self) -> u64 {
        self.0.most
    }

    /// What is held.
    pub fn held(&self) -> u64 {
        self.lock().total
    }

    /// Takes an amount for a holder; a caller without a name may take whatever is free.
    ///
    /// # Errors
    /// [`PoolFull`].
    pub fn take(&self, holder: Option<&Holder>, amount: u64) -> Result<PoolShare, PoolFull> {
        self.add(holder, amount)?;
        Ok(PoolShare { pool: self.clone(), holder: holder.cloned(), amount })
    }

    fn lock(&self) -> MutexGuard<'_, HeldAmounts> {
        // Consistent at every call that could panic.
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, holder: Option<&Holder>, amount: u64) -> Result<(), PoolFull> {
        let mut held = self.lock();
        let total =
            held.total.checked_add(amount).filter(|total| *total <= self.0.most).ok_or(PoolFull::Pool)?;
        if let Some(Holder { name, weight }) = holder {
            let own = held.by_holder.get(name).map_or(0, |(own, _)| *own);
            let highest = held.by_holder.values().map(|(_, weight)| *weight).fold(*weight, f64::max);
            let share = SHARE * (self.0.most - total) as f64 * weight / highest;
            // The first one is any holder's, so that what fits into the pool is not refused forever.
            if own > 0 && (own + amount) as f64 > share {
                return Err(PoolFull::Share);
            }
            if own + amount > 0 {
                held.by_holder.insert(name.clone(), (own + amount, *weight));
            }
        }
        held.total = total;
        Ok(())
    }

    fn remove(&self, holder: Option<&Holder>, amount: u64) {
        let mut held = self.lock();
        held.total -= amount;
        if let Some(Holder { name, .. }) = holder
            && let Some((own, _)) = held.by_holder.get_mut(name)
        {
            *own -= amount;
            if *own == 0 {
                held.by_holder.remove(name);
            }
        }
    }
}

impl PoolShare {
    /// Amount held.
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Takes more.
    ///
    /// # Errors
    /// [`PoolFull`]; the share is unchanged.
    pub fn take_more(&mut self, amount: u64) -> Result<(), PoolFull> {
        self.pool.add(self.holder.as_ref(), amount)?;
        self.amount += amount;
        Ok(())
    }

    /// Gives back all but `amount`.
    pub fn keep(&mut self, amount: u64) {
        let surplus = self.amount.saturating_sub(amount);
        self.pool.remove(self.holder.as_ref(), surplus);
        self.amount -= surplus;
    }

    /// Moves what it has to a share of its own.
    #[must_use]
    pub fn split(&mut self) -> Self {
        Self {
            pool: self.pool.clone(),
            holder: self.holder.clone(),
            amount: std::mem::take(&mut self.amount),
        }
    }

    /// Takes an amount of the same pool, for the same holder.
    ///
    /// # Errors
    /// [`PoolFull`].
    pub fn another(&self, amount: u64) -> Result<Self, PoolFull> {
        self.pool.take(self.holder.as_ref(), amount)
    }

    /// Names the holder of a share that was taken without one.
    pub fn name(&mut self, holder: Holder) {
        if self.holder.is_none() {
            // What was held stays held, whatever the share.
            if self.amount > 0 {
                let mut held = self.pool.lock();
                held.by_holder.entry(holder.name.clone()).or_insert((0, holder.weight)).0 += self.amount;
            }
            self.holder = Some(holder);
        }
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        self.pool.remove(self.holder.as_ref(), self.amount);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn holder(name: &str, weight: f64) -> Holder {
        Holder { name: Arc::from(name), weight }
    }

    fn fill(pool: &SharedPool, holder: &Holder) -> Vec<PoolShare> {
        std::iter::from_fn(|| pool.take(Some(holder), 1).ok()).collect()
    }

    #[test]
    fn one_holder_takes_three_quarters_at_most_and_each_newcomer_finds_some() {
        let pool = SharedPool::new(4096);
        let first = fill(&pool, &holder("a", 1.0));
        assert_eq!(first.len(), 3072);
        assert_eq!(pool.take(Some(&holder("a", 1.0)), 1).unwrap_err(), PoolFull::Share);
        let second = fill(&pool, &holder("b", 1.0));
        assert_eq!(second.len(), 768);
        assert_eq!(fill(&pool, &holder("c", 1.0)).len(), 192);
        // Without a name, whatever is free.
        let rest: Vec<_> = std::iter::from_fn(|| pool.take(None, 1).ok()).collect();
        assert_eq!(rest.len(), 256);
        assert_eq!(pool.take(None, 1).unwrap_err(), PoolFull::Pool);
        drop((first, second, rest));
        assert_eq!((pool.held(), pool.lock().by_holder.len()), (0, 0));
    }

    #[test]
    fn a_lower_weight_takes_a_smaller_share_and_the_first_one_fits_whatever_its_size() {
        let pool = SharedPool::new(1000);
        let heavy = fill(&pool, &holder("heavy", 3.0));
        let light = fill(&pool, &holder("light", 1.0));
        assert_eq!((heavy.len(), light.len()), (750, 125));
        drop((heavy, light));
        let whole = pool.take(Some(&holder("a", 1.0)), 1000).unwrap();
        assert_eq!(pool.take(Some(&holder("b", 1.0)), 1).unwrap_err(), PoolFull::Pool);
        drop(whole);
    }

    proptest! {
        #[test]
        fn what_is_held_is_counted_once_and_given_back(steps in proptest::collection::vec((0..4usize, 0..60u64, 0..5u8), 1..200)) {
            let pool = SharedPool::new(500);
            let mut shares: Vec<(Option<usize>, PoolShare)> = Vec::new();
            for (who, amount, what) in steps {
                let named = (who < 3).then(|| holder(&who.to_string(), 1.0 + who as f64));
                let at = amount as usize % shares.len().max(1);
                match (what, shares.get_mut(at)) {
                    (0, Some(_)) => _ = shares.swap_remove(at),
                    (1, Some((_, share))) => _ = share.take_more(amount),
                    (2, Some((_, share))) => share.keep(amount),
                    (3, Some((holder, share))) => {
                        let moved = (*holder, share.split());
                        shares.push(moved);
                    }
                    (4, Some((holder, share))) if holder.is_none() && who < 3 => {
                        share.name(named.unwrap());
                        *holder = Some(who);
                    }
                    _ => shares.extend(pool.take(named.as_ref(), amount).ok().map(|share| (named.map(|_| who), share))),
                }
                prop_assert_eq!(pool.held(), shares.iter().map(|(_, share)| share.amount()).sum::<u64>());
                prop_assert!(pool.held() <= 500);
                for who in 0..3 {
                    let own = shares.iter().filter(|(holder, _)| *holder == Some(who)).map(|(_, share)| share.amount());
                    let counted = pool.lock().by_holder.get(&*who.to_string()).map_or(0, |(own, _)| *own);
                    prop_assert_eq!(counted, own.sum::<u64>());
                }
            }
            drop(shares);
            prop_assert_eq!((pool.held(), pool.lock().by_holder.len()), (0, 0));
        }
    }
}
