//! Tenants: their keys, certificates and limits, from a file that is reloaded on changes.

mod caller;
mod charge;
mod error;
mod file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use inflight_net::{FileWatcher, Holder, Identity};
use inflight_router_core::{DailyBudget, TenantGate, TenantLimits};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub(crate) use caller::{Caller, Credential};
pub(crate) use charge::TokenCharge;
pub use error::TenantsError;
use file::TenantsFile;

/// Interval of checking the file for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum length of a tenant name, as in the API, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// Digits of a digest that identify a key without a name in the usage log.
const KEY_ID_DIGITS: usize = 12;

/// Tenant with its usage of limits at this router.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) name: Arc<str>,
    state: Mutex<TenantState>,
}

#[derive(Debug)]
pub(crate) struct TenantState {
    pub(crate) limits: TenantLimits,
    /// Whether callers of the tenant may use the Admin service.
    admin: bool,
    pub(crate) gate: TenantGate,
    pub(crate) budget: DailyBudget,
}

impl Tenant {
    fn new(name: &str, limits: TenantLimits) -> Self {
        let (gate, budget) = Default::default();
        Self { name: Arc::from(name), state: Mutex::new(TenantState { limits, admin: false, gate, budget }) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, TenantState> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tenant as a holder of shared pools.
    pub(crate) fn holder(&self) -> Holder {
        Holder { name: self.name.clone(), weight: self.lock().limits.weight.get() }
    }

    pub(crate) fn limits(&self) -> TenantLimits {
        self.lock().limits
    }
}

#[derive(Debug)]
struct ApiKey {
    name: String,
    /// Name of the key or, without one, the head of its digest.
    id: Arc<str>,
    digest: [u8; 32],
    expires: Option<SystemTime>,
    tenant: Arc<Tenant>,
}

impl ApiKey {
    fn is_expired(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }
}

/// Parsed tenants' file, indexed for authentication.
#[derive(Debug, Default)]
struct TenantTable {
    /// Keys by a prefix of their digest, which reveals nothing about the key; the full digest is compared in
    /// constant time.
    keys: BTreeMap<[u8; 8], Vec<ApiKey>>,
    certificates: BTreeMap<Arc<str>, Arc<Tenant>>,
    anonymous: Option<Arc<Tenant>>,
    tenants: BTreeMap<Arc<str>, Arc<Tenant>>,
    /// Tenants that the file had before: one that returns has used its limits.
    removed: BTreeMap<Arc<str>, Arc<Tenant>>,
}

/// Authentication failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AuthenticationError {
    #[error("no API key was given; send it as `authorization: Bearer KEY` or as `x-api-key`")]
    NoKey,
    #[error("the authorization header is not `Bearer KEY`")]
    Malformed,
    #[error("the API key is not known")]
    UnknownKey,
    #[error("the API key {name:?} has expired")]
    Expired { name: String },
    #[error("the client certificate belongs to no tenant")]
    Certificate,
}

/// Tenants of a file that is reloaded on changes.
#[derive(Debug)]
pub(crate) struct Tenants {
    path: PathBuf,
    /// State of the file before it was first read.
    watched: FileWatcher,
    table: RwLock<Arc<TenantTable>>,
}

impl Tenants {
    /// Reads the file.
    pub(crate) fn load(path: &Path) -> Result<Self, TenantsError> {
        let watched = FileWatcher::new([path.to_owned()]);
        let table = TenantTable::read(path, &TenantTable::default())?;
        Ok(Self { path: path.to_owned(), watched, table: RwLock::new(Arc::new(table)) })
    }

    fn table(&self) -> Arc<TenantTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reloads the file; tenants keep their usage. On an error the previous contents stay in force.
    pub(crate) fn reload(&self) -> Result<(), TenantsError> {
        let before = self.table();
        let table = Arc::new(TenantTable::read(&self.path, &before)?);
        let gone = before.tenants.keys().filter(|name| !table.tenants.contains_key(*name)).count();
        // On purpose, or because the file was read while it was written.
        if gone > 0 {
            tracing::warn!(gone, "tenants are no longer in the tenants file; their calls fail");
        }
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = table;
        Ok(())
    }

    /// Reloads the file on changes while polled.
    pub(crate) async fn follow(self: Arc<Self>) {
        let mut watched = self.watched.clone();
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if watched.changed() {
                self.reload_and_tell();
            }
        }
    }

    fn reload_and_tell(&self) {
        let reloaded = self.reload();
        inflight_net::metrics::reloaded("tenants", reloaded.is_ok());
        match reloaded {
            Ok(()) => tracing::info!(tenants = self.table().tenants.len(), "tenants file reloaded"),
            Err(error) => {
                tracing::error!(%error, "tenants file changed but is invalid; keeping the previous one");
            }
        }
    }

    /// Counts tokens that tenants have used today, before this router was started.
    pub(crate) fn count_used(&self, used: &BTreeMap<String, u64>, now: Duration) {
        let table = self.table();
        for (name, tokens) in used {
            if let Some(tenant) = table.tenants.get(name.as_str()) {
                tenant.lock().budget.count(*tokens, now);
            }
        }
    }

    /// Whether a caller's credential is still valid: in the file, for the same tenant, and not expired.
    pub(crate) fn still_knows(&self, caller: &Caller, now: SystemTime) -> bool {
        match caller {
            Caller::Anyone => false,
            Caller::Tenant { tenant, credential } => self.table().knows(tenant, credential, now),
        }
    }

    /// Returns the tenant of a key or, without one, of a certificate, with the credential.
    pub(crate) fn authenticate(
        &self,
        key: Option<&str>,
        certificate: Option<&Identity>,
        now: SystemTime,
    ) -> Result<(Arc<Tenant>, Credential), AuthenticationError> {
        let table = self.table();
        if let Some(key) = key {
            return table.of_key(key, now);
        }
        if let Some(identity) = certificate {
            let names = identity.names.iter().chain([&identity.digest]);
            let found = names.filter_map(|name| table.certificates.get_key_value(name.as_str())).next();
            let found = found.map(|(name, tenant)| (tenant.clone(), Credential::Certificate(name.clone())));
            return found.or_else(|| table.anonymous()).ok_or(AuthenticationError::Certificate);
        }
        table.anonymous().ok_or(AuthenticationError::NoKey)
    }
}

impl TenantTable {
    /// Whether a credential is valid for a tenant.
    fn knows(&self, tenant: &Arc<Tenant>, credential: &Credential, now: SystemTime) -> bool {
        let owner = match credential {
            Credential::Anonymous => self.anonymous.as_ref(),
            Credential::Key { digest, .. } => {
                self.key(digest).filter(|key| !key.is_expired(now)).map(|key| &key.tenant)
            }
            Credential::Certificate(name) => self.certificates.get(name),
        };
        owner.is_some_and(|owner| Arc::ptr_eq(owner, tenant))
    }

    /// Returns the tenant of callers without key and certificate.
    fn anonymous(&self) -> Option<(Arc<Tenant>, Credential)> {
        self.anonymous.clone().map(|tenant| (tenant, Credential::Anonymous))
    }

    /// Returns the key of a digest.
    fn key(&self, digest: &[u8; 32]) -> Option<&ApiKey> {
        let same = self.keys.get(&head(digest)).map_or(&[][..], Vec::as_slice);
        // Every candidate is compared completely, for constant time.
        same.iter()
            .fold(None, |found, key| if bool::from(key.digest.ct_eq(digest)) { Some(key) } else { found })
    }

    fn of_key(&self, key: &str, now: SystemTime) -> Result<(Arc<Tenant>, Credential), AuthenticationError> {
        let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let key = self.key(&digest).ok_or(AuthenticationError::UnknownKey)?;
        if key.is_expired(now) {
            return Err(AuthenticationError::Expired { name: key.name.clone() });
        }
        Ok((key.tenant.clone(), Credential::Key { digest, id: key.id.clone() }))
    }

    fn read(path: &Path, before: &Self) -> Result<Self, TenantsError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| TenantsError::Read { path: path.to_owned(), source })?;
        let json = path.extension().is_some_and(|extension| extension == "json");
        Self::parse(&text, json, before)
            .map_err(|reason| TenantsError::Invalid { path: path.to_owned(), reason })
    }

    /// Parses a tenants' file, in JSON or TOML.
    fn parse(text: &str, json: bool, before: &Self) -> Result<Self, String> {
        Self::build(TenantsFile::parse(text, json)?, before)
    }

    fn build(file: TenantsFile, before: &Self) -> Result<Self, String> {
        let mut table = Self::default();
        let mut changed = Vec::new();
        for (name, entry) in file.tenants {
            if name.is_empty() || name.len() > NAME_BYTES_MAX {
                return Err(format!("the tenant {name:?} must have a name of 1 to {NAME_BYTES_MAX} bytes"));
            }
            let limits = entry
                .limits
                .over(&file.defaults)
                .check()
                .map_err(|reason| format!("tenant {name:?}: {reason}"))?;
            let known = before.tenants.get(name.as_str()).or_else(|| before.removed.get(name.as_str()));
            let tenant = match known {
                Some(tenant) => tenant.clone(),
                None => Arc::new(Tenant::new(&name, limits)),
            };
            for key in entry.keys {
                let digest = parse_digest(&key.sha256).ok_or_else(|| {
                    format!("tenant {name:?}: sha256 of key {:?} is not 64 hex digits", key.name)
                })?;
                let expires = key.expires.as_deref().map(parse_time).transpose();
                let expires = expires
                    .map_err(|reason| format!("tenant {name:?}: expires of key {:?}: {reason}", key.name))?;
                let known = table.keys.entry(head(&digest)).or_default();
                if known.iter().any(|other| other.digest == digest) {
                    return Err(format!("tenant {name:?}: the key {:?} is given twice", key.name));
                }
                let id = if key.name.is_empty() { &key.sha256[..KEY_ID_DIGITS] } else { &key.name };
                let id = Arc::from(id);
                known.push(ApiKey { name: key.name, id, digest, expires, tenant: tenant.clone() });
            }
            for certificate in entry.certificates {
                if table.certificates.insert(Arc::from(certificate.as_str()), tenant.clone()).is_some() {
                    return Err(format!("tenant {name:?}: the certificate {certificate:?} is given twice"));
                }
            }
            changed.push((tenant.clone(), limits, entry.admin));
            table.tenants.insert(tenant.name.clone(), tenant);
        }
        if let Some(name) = &file.anonymous {
            let tenant = table.tenants.get(name.as_str());
            table.anonymous =
                Some(tenant.cloned().ok_or_else(|| format!("anonymous names {name:?}, which is no tenant"))?);
            if changed.iter().any(|(tenant, _, admin)| *admin && *tenant.name == **name) {
                return Err(format!(
                    "anonymous names {name:?}, which has admin = true: everyone would be one"
                ));
            }
        }
        let gone = before.removed.iter().chain(&before.tenants);
        let gone = gone.filter(|(name, _)| !table.tenants.contains_key(*name));
        table.removed = gone.map(|(name, tenant)| (name.clone(), tenant.clone())).collect();
        // Existing tenants change only after the whole file is validated. Those that are gone lose what they may.
        table.removed.values().for_each(|tenant| tenant.lock().admin = false);
        for (tenant, limits, admin) in changed {
            let mut state = tenant.lock();
            (state.limits, state.admin) = (limits, admin);
        }
        Ok(table)
    }
}

fn head(digest: &[u8; 32]) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = *digest;
    [a, b, c, d, e, f, g, h]
}

fn parse_digest(hex: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(digest)
}

fn parse_time(text: &str) -> Result<SystemTime, String> {
    let time = OffsetDateTime::parse(text, &Rfc3339);
    time.map(SystemTime::from)
        .map_err(|error| format!("{text:?} is no time such as 2030-01-31T00:00:00Z: {error}"))
}

/// Entry point for fuzzing: a tenants' file, JSON if it begins with a brace. An accepted one has only limits above 0, and is
/// accepted again over itself, with the same tenants. Returns whether it was accepted.
pub(crate) fn fuzz(text: &str) -> bool {
    let json = text.trim_start().starts_with('{');
    let Ok(table) = TenantTable::parse(text, json, &TenantTable::default()) else { return false };
    for (name, tenant) in &table.tenants {
        assert_eq!(**name, *tenant.name);
        assert!((1..=NAME_BYTES_MAX).contains(&name.len()), "{name:?}");
        let limits = tenant.limits();
        assert!(limits.weight.get().is_finite() && limits.weight.get() > 0.0, "{limits:?}");
        let rates = [limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day];
        let counts = [limits.concurrent_requests, limits.connections];
        assert!(!rates.contains(&Some(0)) && !counts.contains(&Some(0)), "{limits:?}");
    }
    assert!(table.anonymous.iter().all(|tenant| table.tenants.contains_key(&tenant.name)));
    for key in table.keys.values().flatten() {
        assert!(table.tenants.contains_key(&key.tenant.name) && !key.id.is_empty());
        let digest: String = key.digest.iter().map(|byte| format!("{byte:02x}")).collect();
        // Strings with escapes may spell it in another way.
        assert!(text.contains('\\') || text.to_lowercase().contains(&digest), "{digest} was not given");
    }
    let again = TenantTable::parse(text, json, &table).expect("the same file is accepted again");
    for (name, tenant) in &table.tenants {
        assert!(Arc::ptr_eq(tenant, &again.tenants[name]), "{name:?} lost its usage");
    }
    assert_eq!(table.tenants.len(), again.tenants.len());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_of(key: &str) -> String {
        Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn parse(text: &str, before: &TenantTable) -> Result<TenantTable, String> {
        TenantTable::parse(text, false, before)
    }

    fn now() -> SystemTime {
        parse_time("2026-01-01T00:00:00Z").unwrap()
    }

    #[test]
    fn keys_and_certificates_authenticate_until_they_expire() {
        let text = format!(
            r#"
            [defaults]
            requests_per_minute = 60
            [tenants.acme]
            limits = {{ weight = 3, priority_max = 5 }}
            certificates = ["spiffe://c/acme"]
            [[tenants.acme.keys]]
            name = "ci"
            sha256 = "{}"
            expires = "2026-01-01T00:00:01Z"
            [[tenants.acme.keys]]
            sha256 = "{}"
            [tenants.other]
            "#,
            digest_of("first"),
            digest_of("second").to_uppercase()
        );
        let table = parse(&text, &TenantTable::default()).unwrap();
        let name = |found: Result<(Arc<Tenant>, Credential), AuthenticationError>| {
            found.map(|(tenant, _)| tenant.name.to_string())
        };
        assert_eq!(name(table.of_key("first", now())), Ok("acme".to_owned()));
        assert_eq!(name(table.of_key("second", now())), Ok("acme".to_owned()));
        assert_eq!(name(table.of_key("third", now())), Err(AuthenticationError::UnknownKey));
        // The head of a digest finds candidates; only the whole digest is a key's.
        let same_head = format!("{}{}", &digest_of("third")[..16], "0".repeat(48));
        let alike = format!("[tenants.t]\nkeys = [{{ sha256 = {same_head:?} }}]");
        let alike = parse(&alike, &TenantTable::default()).unwrap();
        assert_eq!(name(alike.of_key("third", now())), Err(AuthenticationError::UnknownKey));
        let id = |key: &str| table.of_key(key, now()).unwrap().1.id().to_owned();
        assert_eq!((id("first"), id("second")), ("ci".to_owned(), digest_of("second")[..12].to_uppercase()));
        let later = now() + Duration::from_secs(1);
        assert_eq!(
            name(table.of_key("first", later)),
            Err(AuthenticationError::Expired { name: "ci".to_owned() })
        );
        let limits = table.tenants["acme"].limits();
        assert_eq!((limits.weight.get(), limits.priority_max.get()), (3.0, 5));
        assert_eq!(limits.requests_per_minute, Some(60), "from the defaults");

        let watched = FileWatcher::new([]);
        let tenants = Tenants { path: PathBuf::new(), watched, table: RwLock::new(Arc::new(table)) };
        let shown = |name: &str| Identity { names: vec![name.to_owned()], digest: String::new() };
        let by = |shown: Option<Identity>| name(tenants.authenticate(None, shown.as_ref(), now()));
        assert_eq!(by(Some(shown("spiffe://c/acme"))), Ok("acme".to_owned()));
        assert_eq!(by(Some(shown("spiffe://c/else"))), Err(AuthenticationError::Certificate));
        assert_eq!(by(None), Err(AuthenticationError::NoKey));
        // A key takes precedence over a certificate.
        let both = tenants.authenticate(Some("third"), Some(&shown("spiffe://c/acme")), now());
        assert_eq!(name(both), Err(AuthenticationError::UnknownKey));
    }

    #[test]
    fn an_invalid_key_does_not_make_a_caller_anonymous() {
        let text = format!(
            "anonymous = \"guests\"\n[tenants.guests]\n[tenants.t]\nkeys = [{{ name = \"k\", sha256 = {:?}, expires = \"2020-01-01T00:00:00Z\" }}]",
            digest_of("past")
        );
        let table = RwLock::new(Arc::new(parse(&text, &TenantTable::default()).unwrap()));
        let tenants = Tenants { path: PathBuf::new(), watched: FileWatcher::new([]), table };
        let of = |key| tenants.authenticate(key, None, now()).map(|(tenant, _)| tenant.name.to_string());
        assert_eq!(of(None), Ok("guests".to_owned()));
        assert_eq!(of(Some("")), Err(AuthenticationError::UnknownKey));
        assert_eq!(of(Some("unknown")), Err(AuthenticationError::UnknownKey));
        assert_eq!(of(Some("past")), Err(AuthenticationError::Expired { name: "k".to_owned() }));
    }

    #[test]
    fn a_credential_is_valid_until_it_expires_or_is_removed_whatever_the_name_of_its_successor() {
        let key = |name: &str, expires: &str| {
            format!("{{ name = \"ci\", sha256 = {:?}, expires = \"{expires}\" }}", digest_of(name))
        };
        let (soon, late) = ("2026-01-01T00:00:01Z", "2030-01-01T00:00:00Z");
        let file = |anonymous: &str, of_a: &str, of_b: &str| {
            format!("anonymous = \"{anonymous}\"\n[tenants.a]\n{of_a}\n[tenants.b]\n{of_b}")
        };
        let keys = |keys: &[String]| format!("keys = [{}]", keys.join(","));
        let certificate = "certificates = [\"spiffe://c/x\"]";
        let (old, new) = (keys(&[key("old", soon)]), keys(&[key("new", late)]));
        let before =
            parse(&file("a", &format!("{old}\n{certificate}"), ""), &TenantTable::default()).unwrap();
        let table = RwLock::new(Arc::new(before));
        let tenants = Tenants { path: PathBuf::new(), watched: FileWatcher::new([]), table };
        let identity = Identity { names: vec!["spiffe://c/x".to_owned()], digest: String::new() };
        let callers = [(Some("old"), None), (None, Some(&identity)), (None, None)].map(|(key, identity)| {
            let (tenant, credential) = tenants.authenticate(key, identity, now()).unwrap();
            Caller::Tenant { tenant, credential }
        });
        let later = now() + Duration::from_secs(1);
        let valid = |at| callers.each_ref().map(|caller| tenants.still_knows(caller, at));
        assert_eq!((valid(now()), valid(later)), ([true; 3], [false, true, true]));
        for (text, wanted) in [
            // A rotated key keeps its name; both may be valid for a while.
            (file("a", &format!("{new}\n{certificate}"), ""), [false, true, true]),
            (file("a", &keys(&[key("old", late), key("new", late)]), ""), [true, false, true]),
            // Another tenant's.
            (file("b", "", &format!("{old}\n{certificate}")), [false; 3]),
            ("[tenants.a]".to_owned(), [false; 3]),
        ] {
            let table = parse(&text, &tenants.table()).unwrap();
            *tenants.table.write().unwrap() = Arc::new(table);
            assert_eq!(valid(now()), wanted, "{text}");
        }
        assert!(!tenants.still_knows(&Caller::Anyone, now()));
    }

    #[test]
    fn an_invalid_file_is_rejected_with_what_and_where() {
        let key = format!("keys = [{{ sha256 = {:?} }}]", digest_of("k"));
        let table = [
            ("[tenants.t]\nlimits = { wieght = 1 }".to_owned(), "unknown field `wieght`"),
            ("[tenants.t]\nlimits = { weight = 0 }".to_owned(), "weight is 0"),
            ("[tenants.t]\nlimits = { requests_per_minute = 0 }".to_owned(), "requests_per_minute is 0"),
            ("[tenants.t]\nkeys = [{ sha256 = \"ab\" }]".to_owned(), "not 64 hex digits"),
            (format!("[tenants.t]\nkeys = [{{ sha256 = \"{}\" }}]", "+f".repeat(32)), "not 64 hex digits"),
            ("[tenants.t]\nkeys = [{ key = \"plain\" }]".to_owned(), "unknown field `key`"),
            (format!("[tenants.t]\n{key}\n[tenants.u]\n{key}"), "is given twice"),
            (format!("[tenants.t]\n{}", key.replace(" }", ", expires = \"soon\" }")), "\"soon\" is no time"),
            ("anonymous = \"x\"".to_owned(), "which is no tenant"),
            ("anonymous = \"t\"\n[tenants.t]\nadmin = true".to_owned(), "everyone would be one"),
            ("tenants = 3".to_owned(), "invalid type"),
            ("[tenants.\"\"]".to_owned(), "must have a name"),
            (
                "\n[tenants.t]\nkeys = [\"inflight-0123\"]".to_owned(),
                "line 3: invalid type: string, expected",
            ),
            ("[tenants.t]\nkeys = [{ sha256 = inflight-0123 }]".to_owned(), "line 2: "),
        ];
        for (text, words) in table {
            let reason = parse(&text, &TenantTable::default()).expect_err(words);
            assert!(reason.contains(words), "{words:?} is not in {reason:?}");
            assert!(!reason.contains("0123"), "it has the key: {reason}");
        }
        let reason = TenantTable::parse(
            r#"{"tenants": {"t": {"keys": ["inflight-0123"]}}}"#,
            true,
            &TenantTable::default(),
        );
        let reason = reason.expect_err("a key that is no table");
        assert!(
            reason.contains("expected struct") && reason.contains("line 1") && !reason.contains("0123"),
            "{reason}"
        );
    }

    #[test]
    fn a_reload_keeps_usage_and_an_invalid_file_changes_nothing() {
        let folder = std::env::temp_dir().join(format!("inflight-tenants-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("tenants.toml");
        let write = |concurrent: &str, key: &str| {
            let key = digest_of(key);
            let text = format!(
                "[tenants.t]\nlimits = {{ concurrent_requests = {concurrent} }}\nkeys = [{{ sha256 = {key:?} }}]"
            );
            std::fs::write(&path, text).unwrap();
        };
        write("1", "old");
        let tenants = Tenants::load(&path).unwrap();
        let (tenant, _) = tenants.authenticate(Some("old"), None, now()).unwrap();
        let enter = |tenant: &Tenant| {
            let mut state = tenant.lock();
            let limits = state.limits;
            state.gate.enter(&limits, 1, Duration::ZERO).is_ok()
        };
        assert!(enter(&tenant) && !enter(&tenant));
        write("one", "new");
        assert!(matches!(tenants.reload(), Err(TenantsError::Invalid { .. })));
        assert!(tenants.authenticate(Some("old"), None, now()).is_ok());
        write("2", "new");
        tenants.reload().unwrap();
        assert!(matches!(
            tenants.authenticate(Some("old"), None, now()),
            Err(AuthenticationError::UnknownKey)
        ));
        let (again, _) = tenants.authenticate(Some("new"), None, now()).unwrap();
        assert!(Arc::ptr_eq(&tenant, &again));
        assert!(enter(&again) && !enter(&again), "one of two was used before");
        let text = std::fs::read_to_string(&path).unwrap();
        for without in ["", "[tenants.other]"] {
            std::fs::write(&path, without).unwrap();
            tenants.reload().unwrap();
            assert!(tenants.authenticate(Some("new"), None, now()).is_err());
        }
        std::fs::write(&path, text).unwrap();
        tenants.reload().unwrap();
        let (again, _) = tenants.authenticate(Some("new"), None, now()).unwrap();
        assert!(!enter(&again), "a tenant that was removed for a while has used its limits");
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(tenants.reload(), Err(TenantsError::Read { .. })));
        assert!(tenants.authenticate(Some("new"), None, now()).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
