//! Files with secrets of the processes that `inflight up` starts: the user's, or temporary ones.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ArgMatches;

use super::args::Args;
use super::options::{is_flag, path_flag, replace_flag};
use crate::exit::{CommandError, Exit};
use crate::key;
use crate::temporary_secret::{SecretPath, TemporarySecret};

/// Files that outlive restarts of the processes; temporary ones are removed on drop.
#[derive(Debug)]
pub(super) struct Secrets {
    /// Key of the cursors of streams.
    resume_key: SecretPath,
    /// Secret of the workers.
    worker: SecretPath,
    /// Tenants file with the keys of the command line.
    tenants: Option<TemporarySecret>,
}

impl Secrets {
    /// Takes the files that were given and creates the others.
    ///
    /// # Errors
    /// A file cannot be created, or there are both API keys and a tenants file.
    pub(super) fn new(args: &Args, matches: &ArgMatches) -> Result<Self, CommandError> {
        let file = |id: &str| matches.get_one::<PathBuf>(id).map(PathBuf::as_path);
        if !args.api_keys.is_empty() && file("tenants_file").is_some() {
            let message = "--api-key and --tenants-file are given: put the key into the file, as `inflight key` shows it, or leave one out";
            return Err(CommandError::new(Exit::Usage, message));
        }
        let tenants = (!args.api_keys.is_empty()).then(|| {
            let created = TemporarySecret::create_with("tenants", &tenants_file(&args.api_keys));
            created.map_err(|error| CommandError::chain("cannot create a tenants file", &error))
        });
        Ok(Self {
            resume_key: SecretPath::new(file("resume_key_file"), "resume-key")?,
            worker: SecretPath::new(file("worker_secret_file"), "worker-secret")?,
            tenants: tenants.transpose()?,
        })
    }

    /// Returns the file with the secret of the workers.
    pub(super) fn worker(&self) -> &Path {
        self.worker.path()
    }

    /// Adds the files to the flags of router and workers, and what the operators' service may do.
    pub(super) fn add_to(&self, router: &mut Vec<OsString>, worker: &mut Vec<OsString>, is_loopback: bool) {
        replace_flag(router, "--resume-key-file", self.resume_key.path());
        replace_flag(router, "--worker-secret-file", self.worker());
        if let Some(tenants) = &self.tenants {
            replace_flag(router, "--tenants-file", tenants.path());
        }
        worker.push(path_flag("--secret-file=", self.worker()));
        // On an address of the network, only who has a key may kill workers.
        if !router.iter().any(|flag| is_flag(flag, "--admin")) {
            let has_keys = router.iter().any(|flag| is_flag(flag, "--tenants-file"));
            let admin = if is_loopback || has_keys { "on" } else { "read-only" };
            router.push(format!("--admin={admin}").into());
        }
    }
}

/// Returns a tenants file with one tenant, without limits, that has these keys.
fn tenants_file(keys: &[String]) -> String {
    let key = |(at, key): (usize, &String)| {
        format!("{{ name = \"key-{}\", sha256 = \"{}\" }}", at + 1, key::digest(key))
    };
    let keys: Vec<String> = keys.iter().enumerate().map(key).collect();
    format!("[tenants.default]\nadmin = true\nkeys = [{}]\n", keys.join(", "))
}
