//! Admin service, independent of the protocol: authorization and viewers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use inflight_net::{AddressKey, Peer};
use tokio_util::sync::CancellationToken;

use crate::cluster::worker_calls::WorkerCalls;
use crate::live::hub::Hub;
use crate::live::view::WatchUpdate;
use crate::live::viewer::Viewer;
use crate::live::viewer_places::PlaceLost;
use crate::outcome::{Outcome, Overload};
use crate::protocols::diagnosis::ViewerDiagnosis;
use crate::tenants::{Caller, Tenants};

/// Delay after which a viewer that found no place may try again.
const RETRY: Duration = Duration::from_secs(5);

/// State shared by the gRPC and HTTP front ends of the Admin service.
#[derive(Clone)]
pub(crate) struct Operations {
    pub(crate) hub: Arc<Hub>,
    pub(crate) calls: Arc<WorkerCalls>,
    /// Viewers leave when the router drains.
    pub(crate) drain: CancellationToken,
    /// Tenants, whose file may change while a viewer watches.
    pub(crate) tenants: Option<Arc<Tenants>>,
    /// Diagnosis of the cluster for viewers.
    pub(crate) diagnosis: Arc<ViewerDiagnosis>,
}

impl Operations {
    /// Checks that a caller may use the service.
    pub(crate) fn authorize(caller: Option<&Caller>) -> Result<(), Outcome> {
        let Some(caller) = caller else {
            return Err(Outcome::Unauthenticated("the caller is not known".to_owned()));
        };
        match caller.lacks_admin() {
            None => Ok(()),
            Some(tenant) => Err(Outcome::Denied(format!(
                "the tenant {tenant:?} is no administrator; its entry in the tenants file needs admin = true"
            ))),
        }
    }

    /// Checks that a caller who may use the service may still do so.
    fn authorize_again(&self, caller: &Caller) -> Result<(), Outcome> {
        Self::authorize(Some(caller))?;
        match &self.tenants {
            Some(tenants) if !tenants.still_knows(caller, SystemTime::now()) => {
                Err(Outcome::Unauthenticated("the API key or certificate is no longer valid".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Gives a caller a viewer's place.
    pub(crate) fn watch(
        &self,
        caller: Option<&Caller>,
        peer: Option<&Peer>,
        rate: u32,
        iterations: bool,
        protocol: &'static str,
    ) -> Result<Watching, Outcome> {
        Self::authorize(caller)?;
        let full = || {
            let most = self.hub.viewers_max();
            let what = format!("{most} viewers watch the router, the limit (--viewers-max); try again later");
            Outcome::Limited(Box::new(Overload::of_router(what, "viewers", RETRY)))
        };
        // An authorized caller is known.
        let caller = caller.cloned().unwrap_or(Caller::Anyone);
        // Callers without keys are told apart by their addresses.
        let whose = match (&caller, peer.and_then(Peer::address)) {
            (Caller::Anyone, Some(address)) => format!("{:?}", AddressKey::of(address.ip())).into(),
            _ => caller.tenant(),
        };
        let viewer = Viewer::enter(&self.hub, whose, rate, iterations, protocol).ok_or_else(full)?;
        Ok(Watching { operations: self.clone(), caller, viewer, diagnosed: 0 })
    }
}

/// Viewer with the caller whose it is.
pub(crate) struct Watching {
    operations: Operations,
    caller: Caller,
    viewer: Viewer,
    /// Number of the diagnosis that was sent last.
    diagnosed: u64,
}

impl Watching {
    /// Waits for the next update.
    ///
    /// # Errors
    /// The router drains, the caller may not watch any more, it has read nothing for too long, or others took its place.
    pub(crate) async fn next(&mut self) -> Result<WatchUpdate, Outcome> {
        tokio::select! {
            biased;
            () = self.operations.drain.cancelled() => return Err(Outcome::Draining),
            kept = self.viewer.wait() => match kept {
                Ok(()) => {}
                Err(PlaceLost::Stalled) => {
                    return Err(Outcome::ClientStalled { waited: self.operations.hub.stall_timeout() });
                }
                Err(PlaceLost::Displaced) => {
                    let most = self.operations.hub.viewers_max();
                    let what = format!(
                        "{most} viewers watch the router, the limit (--viewers-max), and another one with fewer streams took this place"
                    );
                    return Err(Outcome::Limited(Box::new(Overload::of_router(what, "viewers", RETRY))));
                }
            }
        }
        self.operations.authorize_again(&self.caller)?;
        let mut update = self.viewer.update();
        let latest = self.operations.diagnosis.latest();
        if let Some(latest) = latest.filter(|latest| latest.number > self.diagnosed) {
            self.diagnosed = latest.number;
            update.diagnosis = Some(latest.view);
        }
        Ok(update)
    }

    /// Counts the bytes of an update.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.viewer.sent(bytes);
    }
}
