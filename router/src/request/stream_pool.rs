//! Open calls of all tenants.

use std::time::Duration;

use inflight_net::{PoolFull, PoolShare, SharedPool};

use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::tenants::Caller;

/// Places of open calls (`--streams-max`), shared between tenants.
pub(super) struct StreamPool {
    pool: SharedPool,
    most: usize,
    retry_delay: Duration,
}

impl StreamPool {
    pub(super) fn new(options: &Options) -> Self {
        let (most, retry_delay) = (options.streams_max, options.retry_delay);
        Self { pool: SharedPool::new(most as u64), most, retry_delay }
    }

    /// Takes the place of an open call of a caller.
    pub(super) fn take(&self, caller: &Caller) -> Result<PoolShare, Outcome> {
        let holder = caller.holder();
        self.pool.take(holder.as_ref(), 1).map_err(|full| {
            let (most, open) = (self.most, self.pool.held());
            let what = match full {
                PoolFull::Pool => format!("{most} calls are open, the limit (--streams-max)"),
                PoolFull::Share => format!(
                    "{open} calls of {most} are open (--streams-max), and the tenant's are as many as its share of what is left"
                ),
            };
            let what = format!("{what}; try again later");
            Outcome::Full(Box::new(Overload::of_router(what, "streams", self.retry_delay)))
        })
    }
}
