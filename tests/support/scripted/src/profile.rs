//! Registration and behaviour of a scripted worker.

use std::collections::BTreeMap;

use inflight_fixtures::Family;
use inflight_proto::{PROTOCOL_VERSION, bundle_digest, v1};

type Files = BTreeMap<&'static str, Vec<u8>>;

/// Hello message and behaviour of a scripted worker.
#[derive(Clone)]
pub struct WorkerProfile {
    /// Name of the model.
    pub model: &'static str,
    /// Further names of the model.
    pub model_aliases: &'static [&'static str],
    /// Numerics fingerprint.
    pub fingerprint: &'static str,
    /// Context window of the model in tokens.
    pub context_tokens: u32,
    /// Announced interval of heartbeats in milliseconds; the worker itself sends none.
    pub heartbeat_interval_ms: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Files of the bundle by name.
    pub files: Files,
    /// Number of corrupted bundles served before a valid one.
    pub bad_bundles: u32,
    /// Number of sessions whose commands the worker does not read, before one that it reads.
    pub unread_sessions: u32,
    /// Id of the process.
    pub incarnation: &'static str,
    /// Certificate, key, and the authority of routers.
    pub tls: Option<[String; 3]>,
    /// Name of the worker.
    pub worker_id: &'static str,
}

impl Default for WorkerProfile {
    fn default() -> Self {
        let family = Family::Llama3;
        let files = BTreeMap::from([
            ("tokenizer.json", family.tokenizer_json().as_bytes().to_vec()),
            ("tokenizer_config.json", family.tokenizer_config_json().as_bytes().to_vec()),
        ]);
        Self {
            model: "tiny",
            model_aliases: &[],
            fingerprint: "f1",
            context_tokens: 256,
            heartbeat_interval_ms: 60_000,
            vocab_size: 285,
            files,
            bad_bundles: 0,
            unread_sessions: 0,
            incarnation: "1",
            tls: None,
            worker_id: "scripted",
        }
    }
}

/// Callers that a scripted worker accepts.
#[derive(Debug, Clone)]
pub enum Access {
    /// Accepts every caller and sends no proof.
    Open,
    /// Accepts callers that prove one of these secrets, and proves it to them.
    Secrets(Vec<Vec<u8>>),
    /// Accepts every caller and answers with an invalid proof.
    Impostor,
}

/// Messages and behaviour of a scripted worker.
#[derive(Debug, Clone)]
pub struct Script {
    /// First message of each session; a proof is added.
    pub hello: v1::Hello,
    /// Pieces of its bundle.
    pub bundle: Vec<v1::FetchBundleResponse>,
    /// Callers that the worker accepts.
    pub access: Access,
    /// Number of corrupted bundles served before a valid one.
    pub bad_bundles: u32,
    /// Number of sessions whose commands the worker does not read, before one that it reads.
    pub unread_sessions: u32,
    /// Certificate, key, and the authority of routers.
    pub tls: Option<[String; 3]>,
    /// Answer to a diagnosis; `None`: UNIMPLEMENTED.
    pub diagnosis: Option<v1::DiagnoseResponse>,
}

impl From<WorkerProfile> for Script {
    fn from(profile: WorkerProfile) -> Self {
        let files = &profile.files;
        let hello = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            worker_id: profile.worker_id.to_owned(),
            incarnation: profile.incarnation.to_owned(),
            fingerprint: profile.fingerprint.to_owned(),
            model: profile.model.to_owned(),
            architecture: "LlamaForCausalLM".to_owned(),
            bundle_digest: bundle_digest(files.iter().map(|(name, data)| (*name, data.as_slice()))),
            limits: Some(v1::WorkerLimits {
                vocab_size: profile.vocab_size,
                context_tokens: profile.context_tokens,
                block_tokens: 16,
                kv_blocks: 1 << 16,
                max_sequences: 64,
                host_kv_blocks: 0,
                kv_tokens: 1 << 20,
            }),
            heartbeat_interval_ms: profile.heartbeat_interval_ms,
            secret_proof: Vec::new(),
            model_aliases: profile.model_aliases.iter().map(|alias| (*alias).to_owned()).collect(),
            facts: None,
            layer_groups: Vec::new(),
            state_blocks: 0,
        };
        let pieces = files.iter().flat_map(|(file, data)| data.chunks(1000).map(move |data| (*file, data)));
        let piece = |(file, data): (&str, &[u8])| v1::FetchBundleResponse {
            file: file.to_owned(),
            data: data.to_vec(),
        };
        Self {
            hello,
            bundle: pieces.map(piece).collect(),
            access: Access::Open,
            bad_bundles: profile.bad_bundles,
            unread_sessions: profile.unread_sessions,
            tls: profile.tls,
            diagnosis: None,
        }
    }
}
