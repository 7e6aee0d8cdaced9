//! Authenticated callers and their credentials.

use std::sync::Arc;

use inflight_net::Holder;

use super::Tenant;

/// Authenticated caller, in the extensions of every call that passed authentication.
#[derive(Debug, Clone)]
pub(crate) enum Caller {
    /// No tenants are configured: requests name their tenant, weight and priority themselves.
    Anyone,
    /// Tenant of the file.
    Tenant {
        /// The tenant.
        tenant: Arc<Tenant>,
        /// Proof that the caller belongs to it.
        credential: Credential,
    },
}

/// Credential by which a caller belongs to a tenant.
#[derive(Debug, Clone)]
pub(crate) enum Credential {
    /// No key and no certificate: the caller belongs to the tenant that `anonymous` names in the tenants file.
    Anonymous,
    /// API key.
    Key {
        /// SHA-256 of the key: unlike its name, it changes when the key is rotated.
        digest: [u8; 32],
        /// Name of the key, or the first digits of its digest if it has no name.
        id: Arc<str>,
    },
    /// Client certificate, by the name or digest that the file lists.
    Certificate(Arc<str>),
}

impl Credential {
    /// Returns the id of the credential in the usage log; empty without one.
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Anonymous => "",
            Self::Key { id, .. } | Self::Certificate(id) => id,
        }
    }
}

impl Caller {
    /// Returns the name of the caller's tenant; empty without tenants.
    pub(crate) fn tenant(&self) -> Arc<str> {
        match self {
            Self::Anyone => Arc::default(),
            Self::Tenant { tenant, .. } => tenant.name.clone(),
        }
    }

    /// Returns the id of the caller's key or certificate; empty without one.
    pub(crate) fn key_id(&self) -> &str {
        match self {
            Self::Anyone => "",
            Self::Tenant { credential, .. } => credential.id(),
        }
    }

    /// Whether the caller has neither key nor certificate.
    pub(crate) fn is_anonymous(&self) -> bool {
        matches!(self, Self::Tenant { credential: Credential::Anonymous, .. })
    }

    /// Returns the holder of what the caller takes of shared pools; `None` without tenants, where callers name themselves.
    pub(crate) fn holder(&self) -> Option<Holder> {
        match self {
            Self::Anyone => None,
            Self::Tenant { tenant, .. } => Some(tenant.holder()),
        }
    }

    /// Whether the caller has shown nothing that a page of another site could not show, too.
    pub(crate) fn has_no_key(&self) -> bool {
        matches!(self, Self::Anyone) || self.is_anonymous()
    }

    /// Returns the tenant's name if the caller may not use the service for operators.
    pub(crate) fn lacks_admin(&self) -> Option<&str> {
        match self {
            Self::Anyone => None,
            Self::Tenant { tenant, .. } => (!tenant.lock().admin).then_some(&tenant.name),
        }
    }
}
