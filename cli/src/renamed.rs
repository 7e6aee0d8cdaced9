//! Former names of flags, configuration keys, environment variables and metrics. Use of one is rejected with
//! its new name; nothing is silently ignored.

use std::ffi::{OsStr, OsString};

use crate::exit::{CommandError, Exit};

/// Renamed flag of a subcommand, without dashes; configuration keys have the same names.
#[derive(Debug, Clone, Copy)]
struct Flag {
    role: &'static str,
    old: &'static str,
    new: &'static str,
}

const fn flag(role: &'static str, old: &'static str, new: &'static str) -> Flag {
    Flag { role, old, new }
}

const FLAGS: [Flag; 9] = [
    flag("router", "unserved-wait-max", "no-worker-timeout"),
    flag("router", "worker-silence-max", "session-timeout"),
    flag("router", "queue-wait-max", "aging-threshold"),
    flag("router", "aged-tokens-per-second", "aging-tokens-per-second"),
    flag("router", "aged-tokens-max", "aging-tokens-max"),
    flag("router", "overtakes-max", "bypass-max"),
    flag("router", "model-memory", "model-retention"),
    flag("router", "journal-tokens-max", "request-tokens-max"),
    flag("bench", "evenly", "constant-rate"),
];

/// Renamed metrics as pairs of old and new name.
pub const METRICS: [(&str, &str); 19] = [
    ("inflight_router_overtakes_total", "inflight_router_queue_bypasses_total"),
    ("inflight_router_routers", "inflight_router_cluster_routers"),
    ("inflight_router_tenant_refused_total", "inflight_router_tenant_rejections_total"),
    ("inflight_router_tokenize_waiting", "inflight_router_tokenize_queue_requests"),
    ("inflight_router_streams", "inflight_router_open_calls"),
    ("inflight_router_suspects_total", "inflight_router_quarantined_requests_total"),
    (
        "inflight_router_parked_requests",
        "inflight_router_retry_queue_requests and inflight_router_quarantine_queue_requests",
    ),
    ("inflight_router_prefix_index_overfull_total", "inflight_router_prefix_index_dropped_events_total"),
    ("inflight_router_placed_tokens_total", "inflight_router_dispatched_prompt_tokens_total"),
    ("inflight_router_placed_cached_tokens_total", "inflight_router_dispatched_cached_tokens_total"),
    ("inflight_worker_ended_total", "inflight_worker_finished_sequences_total"),
    ("inflight_worker_commands_queued", "inflight_worker_engine_queue_commands"),
    ("inflight_worker_device_commands_queued", "inflight_worker_device_queue_commands"),
    ("inflight_worker_step_seconds", "inflight_worker_iteration_seconds"),
    ("inflight_worker_step_tokens", "inflight_worker_iteration_tokens"),
    ("inflight_worker_sampled_tokens_total", "inflight_worker_generated_tokens_total"),
    ("inflight_worker_host_blocks_used", "inflight_worker_host_kv_blocks_used"),
    ("inflight_worker_sessions_refused_total", "inflight_worker_sessions_rejected_total"),
    ("inflight_reloads_total", "inflight_file_reloads_total"),
];

/// Returns the new name of a renamed configuration key.
pub fn key(role: &str, key: &str) -> Option<&'static str> {
    let renamed = FLAGS.iter().find(|flag| flag.role == role && flag.old == key);
    renamed.map(|flag| flag.new)
}

/// Rejects flags and environment variables with former names.
///
/// # Errors
/// A message with the old and the new name.
pub fn check(
    arguments: &[OsString],
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<(), CommandError> {
    let refuse = |old: String, new: String| {
        Err(CommandError::new(Exit::Usage, format!("{old} was renamed to {new}; use the new name")))
    };
    let has = |argument: &OsString, old: &str| {
        let Some(name) = argument.to_str().and_then(|text| text.strip_prefix("--")) else { return false };
        name.split('=').next() == Some(old)
    };
    for flag in FLAGS.iter().filter(|flag| arguments.iter().any(|argument| argument == flag.role)) {
        if arguments.iter().any(|argument| has(argument, flag.old)) {
            return refuse(format!("--{}", flag.old), format!("--{}", flag.new));
        }
    }
    // `up` passes its environment to its router.
    let serves = ["router", "up"].iter().any(|role| arguments.iter().any(|argument| argument == role));
    let variable = |name: &str| format!("INFLIGHT_ROUTER_{}", name.to_uppercase().replace('-', "_"));
    let set: Vec<OsString> = environment.into_iter().map(|(name, _)| name).collect();
    for flag in FLAGS.iter().filter(|flag| serves && flag.role == "router") {
        if set.iter().any(|name| name == OsStr::new(&variable(flag.old))) {
            return refuse(variable(flag.old), variable(flag.new));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn an_old_flag_or_variable_is_rejected_with_its_new_name() {
        let refused = |arguments: &[&str], variable: &str| {
            let environment = [(OsString::from(variable), OsString::from("1"))];
            match check(&words(arguments), environment) {
                Err(CommandError::Message(Exit::Usage, message)) => Some(message),
                other => {
                    other.unwrap();
                    None
                }
            }
        };
        let message = refused(&["inflight", "router", "--overtakes-max=3"], "").unwrap();
        assert_eq!(message, "--overtakes-max was renamed to --bypass-max; use the new name");
        let message = refused(&["inflight", "up"], "INFLIGHT_ROUTER_MODEL_MEMORY").unwrap();
        assert!(message.contains("INFLIGHT_ROUTER_MODEL_RETENTION"), "{message}");
        assert_eq!(refused(&["inflight", "worker"], "INFLIGHT_ROUTER_MODEL_MEMORY"), None);
        assert_eq!(refused(&["inflight", "router", "--bypass-max=3"], "INFLIGHT_ROUTER_BYPASS_MAX"), None);
        assert_eq!(key("router", "queue-wait-max"), Some("aging-threshold"));
        assert_eq!(key("worker", "queue-wait-max"), None);
    }

    #[test]
    fn every_new_name_exists_and_no_old_one_does() {
        let command = Cli::command();
        for Flag { role, old, new } in FLAGS {
            let role = command.find_subcommand(role).unwrap();
            let flags: Vec<_> = role.get_arguments().filter_map(clap::Arg::get_long).collect();
            assert!(flags.contains(&new) && !flags.contains(&old), "{old} to {new}");
        }
        let exported: Vec<&str> = inflight_router::metrics::METRICS
            .iter()
            .map(|metric| metric.name)
            .chain(inflight_worker::metrics::INVENTORY.iter().map(|(name, ..)| *name))
            .chain(inflight_net::metrics::METRICS.iter().map(|(name, ..)| *name))
            .collect();
        for (old, new) in METRICS {
            assert!(new.split(" and ").all(|new| exported.contains(&new)), "{new}");
            assert!(!exported.contains(&old), "{old}");
        }
    }
}
