//! What `inflight up` prints once the cluster is ready.

use std::path::Path;

use inflight_proto::v1::Model;

use crate::event::ClusterMember;
use crate::quick_build;

/// Addresses and models of a cluster that is ready.
pub(super) struct Announcement<'a> {
    /// `HOST:PORT` of the router.
    pub(super) endpoint: String,
    /// Scheme of URLs.
    pub(super) scheme: &'a str,
    /// URL of the HTTP APIs, if served.
    pub(super) http: Option<String>,
    /// Models as the router lists them; none if it does that only with a key.
    pub(super) models: &'a [Model],
    /// Names of the models as far as they are known without the router.
    pub(super) names: &'a [&'a [String]],
    pub(super) router: &'a ClusterMember,
    pub(super) workers: &'a [&'a ClusterMember],
    /// Name of each worker's model, if there are several.
    pub(super) model_of: &'a [Option<&'a str>],
    /// File with the secret of the workers.
    pub(super) worker_secret: &'a Path,
}

impl Announcement<'_> {
    /// Returns it as text.
    pub(super) fn text(&self) -> String {
        let Self { endpoint, scheme, http, models, names, router, workers, model_of, worker_secret } = self;
        let command = own_command();
        let endpoint_flag = if endpoint == "127.0.0.1:8650" && *scheme == "http" {
            String::new()
        } else {
            format!("--endpoint {scheme}://{endpoint} ")
        };
        let mut text = String::from("\ninflight is ready\n\n");
        if let Some(notice) = quick_build::notice() {
            text.push_str(&format!("  note     {notice}\n"));
        }
        for model in *models {
            let Model { name, architecture, context_tokens, aliases, .. } = model;
            let also =
                if aliases.is_empty() { String::new() } else { format!("also {}, ", aliases.join(", ")) };
            text.push_str(&format!(
                "  model    {name} ({also}{architecture}, context of {context_tokens} tokens)\n"
            ));
        }
        for names in names.iter().filter(|names| models.is_empty() && !names.is_empty()) {
            text.push_str(&format!("  model    {}\n", names.join(", ")));
        }
        text.push_str(&format!("  gRPC     {endpoint}\n"));
        if let Some(http) = http {
            text.push_str(&format!("  HTTP     {http}/v1 (OpenAI), {http} (Anthropic)\n"));
            text.push_str(&format!("  pages    {http}/chat (chat), {http}/ui (live view)\n"));
        }
        for (worker, model) in workers.iter().zip(*model_of) {
            let model = model.map_or(String::new(), |model| format!(", {model}"));
            text.push_str(&format!("  worker   {} ({}{model})\n", worker.address, worker.name));
        }
        for member in std::iter::once(router).chain(*workers) {
            if let Some(metrics) = member.metrics {
                text.push_str(&format!("  metrics  http://{metrics}/metrics ({})\n", member.name));
            }
        }
        let (secret, addresses) = (worker_secret.display(), addresses(workers));
        let top = format!("{command} top {endpoint_flag}");
        text.push_str(&format!(
            "\nSee what they do, and what limits the workers:\n\n  {}\n  \
             {command} diagnose --worker-secret-file {secret} {addresses}\n",
            top.trim_end()
        ));
        // Of several models, requests name one.
        let several = model_of.first().copied().flatten();
        let example = models.iter().find(|model| several.is_none_or(|name| model.name == name));
        let curl = http.as_ref().map_or_else(String::new, |http| curl(http, example, several));
        let model_flag = several.map_or(String::new(), |name| format!("--model {name} "));
        let model_key = several.map_or(String::new(), |name| format!("\"model\": \"{name}\", "));
        text.push_str(&format!(
            "\nTry, from another terminal:\n\n  {command} generate {endpoint_flag}{model_flag}\"What is continuous batching?\"\n{curl}  \
             grpcurl -plaintext -d '{{{model_key}\"text\": \"Once upon a time\"}}' {endpoint} inflight.v1.Inference/Generate\n\n\
             Stop it with Ctrl-C here, or with:\n\n  kill {}\n",
            std::process::id()
        ));
        text
    }
}

/// Returns the addresses of members as command-line arguments.
fn addresses(members: &[&ClusterMember]) -> String {
    members.iter().map(|member| member.address.to_string()).collect::<Vec<_>>().join(" ")
}

/// Returns a command line that calls the HTTP APIs: a conversation, or a text if the model has no chat
/// template.
fn curl(http: &str, model: Option<&Model>, named: Option<&str>) -> String {
    let (path, body) = match model {
        Some(model) if !model.has_chat_template => {
            ("completions", r#"{"prompt": "Once upon a time", "max_tokens": 64}"#)
        }
        _ => (
            "chat/completions",
            r#"{"messages": [{"role": "user", "content": "What is continuous batching?"}]}"#,
        ),
    };
    let body = match named {
        Some(name) => format!("{{\"model\": \"{name}\", {}", &body[1..]),
        None => body.to_owned(),
    };
    // Without a key no model is known here: the router requires one.
    let key = if model.is_none() { " -H \"authorization: Bearer $KEY\"" } else { "" };
    format!("  curl {http}/v1/{path} -H 'content-type: application/json'{key} -d '{body}'\n")
}

/// Returns the command that runs this program from a shell in the current directory.
fn own_command() -> String {
    let Ok(program) = std::env::current_exe() else { return "inflight".to_owned() };
    let on_path = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path)
            .any(|directory| directory.join("inflight").canonicalize().is_ok_and(|p| p == program))
    });
    if on_path {
        return "inflight".to_owned();
    }
    let here = std::env::current_dir().ok();
    match here.and_then(|here| program.strip_prefix(here).map(|relative| relative.to_owned()).ok()) {
        Some(relative) => format!("./{}", relative.display()),
        None => program.display().to_string(),
    }
}
