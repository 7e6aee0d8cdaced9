//! What the steps of a request share.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dispatcher::SharedDispatcher;
use crate::options::Options;
use crate::request::cold_start::ColdStart;
use crate::request::cursor::CursorKeys;
use crate::request::stream_pool::StreamPool;
use crate::request::tokenizing::Tokenizing;
use crate::usage::log::UsageLog;

/// Resources of the steps of all requests.
pub(super) struct Resources {
    pub(super) options: Options,
    pub(super) dispatch: Arc<SharedDispatcher>,
    pub(super) streams: StreamPool,
    pub(super) tokenizing: Tokenizing,
    pub(super) compiling: Tokenizing,
    /// Open API calls.
    pub(super) open: TaskTracker,
    pub(super) usage: Option<Arc<UsageLog>>,
    pub(super) cursors: CursorKeys,
    pub(super) cold_start: ColdStart,
}

impl Resources {
    pub(super) fn new(
        options: &Options,
        dispatch: Arc<SharedDispatcher>,
        open: TaskTracker,
        usage: Option<Arc<UsageLog>>,
        drain: CancellationToken,
    ) -> Self {
        Self {
            options: options.clone(),
            dispatch,
            streams: StreamPool::new(options),
            tokenizing: Tokenizing::new(options),
            compiling: Tokenizing::of_grammars(options),
            open,
            usage,
            cold_start: ColdStart::new(options, drain),
            cursors: CursorKeys::new(&options.resume_keys, options.resume_age_max),
        }
    }
}
