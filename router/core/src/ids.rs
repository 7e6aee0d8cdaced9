//! Ids of what a router keeps apart: workers, sessions, requests, submissions, lanes.

use serde::{Deserialize, Serialize};

slotmap::new_key_type! {
    /// Id of a request at this router, unique among those it has held.
    pub struct RequestId;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($of:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        pub struct $name(pub $of);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// Index of a worker in the router's membership; stays the same over its sessions.
    WorkerId(u32)
}
id! {
    /// Number of a session between the router and a worker, unique in the router.
    SessionId(u64)
}
id! {
    /// Number of a request's attempt on a worker, unique in the router; its key in a session's messages.
    SubmissionId(u64)
}
id! {
    /// Lane of the queue: requests for one model with one bundle.
    LaneId(u32)
}
