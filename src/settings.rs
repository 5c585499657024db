//! Typed settings. Read once, at start; everything behind it can rely on their ranges.
//!
//! Layers, later ones win: `config/default.toml` (compiled in; with `preset = "paper"` also
//! `config/paper.toml`), the user's file, the environment (`KVC__SECTION__KEY`), flags. Every default lives
//! in those two files and nowhere else; they are also the list of known keys.

mod change;
mod check;
mod error;
pub mod keys;
mod load;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

pub use check::{is_base_url, is_loopback};
pub use error::SettingsError;
pub use load::{Layers, Loaded};

use crate::core::options::{Options, Preset};
use crate::core::types::{Millis, Tokens};
use crate::engines::{Engine, EngineKind};
use crate::keeper::events::Publisher;
use crate::prompt::{Api, Strip};

/// Everything a user can set.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The gateway.
    pub http: Http,
    /// Name of the preset `options` started from.
    pub preset: Preset,
    /// The algorithm: the preset with the user's overrides.
    pub options: Options,
    /// The workers.
    pub fleet: Fleet,
    /// What is remembered of sessions.
    pub sessions: Sessions,
    /// The builtin worker.
    pub node: Node,
    /// The demo.
    pub demo: Demo,
}

impl Settings {
    /// Reads and validates all layers.
    ///
    /// # Errors
    /// The first problem: which key, where it was set, its value and what is allowed.
    pub fn load(layers: &Layers) -> Result<Loaded, SettingsError> {
        load::load(layers)
    }

    /// Checks that there is somebody to serve: what `serve` needs beyond valid settings.
    ///
    /// # Errors
    /// No decode worker is configured.
    pub fn require_workers(&self) -> Result<(), SettingsError> {
        if !self.fleet.decode.is_empty() {
            return Ok(());
        }
        Err(SettingsError::Value {
            key: "fleet.decode".into(),
            value: "[]".into(),
            origin: "no workers configured".into(),
            allowed: "at least one base URL, e.g. --decode http://10.0.0.5:8101".into(),
        })
    }
}

/// `[http]`: the gateway.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// `host:port`; port 0 lets the system choose.
    pub listen: String,
    /// Serving threads; 0 = one per core.
    pub workers: usize,
    /// Largest request body in MiB, 1 to 1024.
    pub body_limit_mib: usize,
    /// Open client connections per thread, ≥ 1.
    pub max_connections: usize,
    /// Requests served at once, ≥ 1.
    pub max_inflight: usize,
    /// Seconds an idle client connection is kept; 0 = closed after each response.
    pub keep_alive_s: u64,
    /// Seconds for a request's head, and for its body, ≥ 1.
    pub request_timeout_s: u64,
    /// Seconds until a worker's head, and then its first byte, ≥ 1.
    pub first_byte_timeout_s: u64,
    /// Seconds of silence in mid-stream, ≥ 1.
    pub idle_timeout_s: u64,
    /// Whether a stream that broke off goes on at another worker, where its text cannot differ.
    pub resume_streams: bool,
    /// Seconds of accepting after SIGTERM while not ready.
    pub drain_delay_s: u64,
    /// Seconds for running turns after that.
    pub drain_s: u64,
    /// Who may ask.
    pub auth: Auth,
    /// API keys, as [`keys::ApiKey`] reads them.
    pub keys: Vec<String>,
    /// A file with more of them; empty = none.
    pub keys_file: String,
    /// `host:port` of a listener of its own for what is not API; empty = none.
    pub admin_listen: String,
    /// PEM file of the listener's certificate chain; empty = no TLS.
    pub tls_cert: String,
    /// PEM file of its private key.
    pub tls_key: String,
    /// Whether clients may ask for a decision record.
    pub explain: bool,
}

impl Http {
    /// Largest request body in bytes.
    pub fn body_limit(&self) -> usize {
        self.body_limit_mib << 20
    }
}

/// Who may use the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auth {
    /// Whoever has a key; without keys everybody, on a loopback address only.
    Auto,
    /// Whoever has a key.
    Keys,
    /// Everybody.
    Open,
}

/// Where Admit is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// At the worker, which owns the truth about its KV.
    Node,
    /// In the gateway, which keeps the books of engines that don't.
    Local,
}

/// What is taken out of bodies before the workers see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stripped {
    /// Claude Code's attribution text at the head of `system`.
    Attribution,
    /// Cache breakpoints.
    CacheControl,
}

/// An API that engines speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spoken {
    /// Chat completions, and completions.
    Chat,
    /// Responses.
    Responses,
    /// Messages, with the counting of tokens.
    Messages,
}

/// `[fleet]`: the workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fleet {
    /// Kind of the workers.
    pub engine: EngineKind,
    /// Where Admit is decided; absent = where the engine's kind has it.
    pub admission: Option<Admission>,
    /// `K_d` of each worker in tokens; absent = what the engine says.
    pub k_d: Option<Tokens>,
    /// Whether the D workers have this project's plugin for SGLang: they append to what they hold.
    pub sglang_plugin: bool,
    /// Where engines publish KV events: `URL=tcp://host:port`, or `URL=bind:tcp://host:port` where the engine connects.
    pub kv_events: Vec<String>,
    /// Where they send past KV events again: `URL=tcp://host:port`.
    pub kv_replay: Vec<String>,
    /// Bootstrap servers of vLLM's Mooncake connector: `URL=http://host:port` for each P; empty = the NIXL connector.
    pub mooncake: Vec<String>,
    /// Base URLs of the P workers, `http://host:port`, without a trailing slash.
    pub prefill: Vec<String>,
    /// Base URLs of the D workers.
    pub decode: Vec<String>,
    /// The APIs their engine serves itself; empty = what its kind is known to. The others are translated to chat.
    pub apis: Vec<Spoken>,
    /// What their engine would choke on.
    pub strip: Vec<Stripped>,
    /// Longest wait for an Admit answer, in ms, ≥ 1.
    pub admit_timeout_ms: Millis,
    /// Longest wait for a connection, in ms, ≥ 1.
    pub connect_timeout_ms: Millis,
    /// Failures in a row after which a worker is left alone; 0 = never.
    pub breaker_failures: u32,
    /// How long, the first time, in ms, ≥ 1.
    pub breaker_open_ms: Millis,
    /// What workers are shown on every request; empty = nothing.
    pub worker_key: Secret,
    /// PEM file with the authorities of https workers; empty = the system's.
    pub ca_file: String,
}

/// Entries `URL=value` by their URLs.
fn by_url(entries: &[String]) -> HashMap<String, String> {
    let pairs = entries.iter().filter_map(|entry| entry.split_once('='));
    pairs.map(|(url, value)| (url.trim_end_matches('/').to_owned(), value.to_owned())).collect()
}

impl Fleet {
    /// Whether the engine serves this API itself.
    pub fn speaks(&self, api: Api) -> bool {
        let spoken = match api {
            Api::Chat | Api::Completions => return true,
            Api::Responses => Spoken::Responses,
            Api::Messages => Spoken::Messages,
        };
        match &*self.apis {
            [] => self.engine.capabilities().all_apis,
            apis => apis.contains(&spoken),
        }
    }

    /// Where Admit is decided.
    pub fn admission(&self) -> Admission {
        let own = if self.engine.capabilities().admits { Admission::Node } else { Admission::Local };
        self.admission.unwrap_or(own)
    }

    /// Where engines publish KV events, by their base URLs.
    pub fn kv_events(&self) -> HashMap<String, Publisher> {
        let mut replay = by_url(&self.kv_replay);
        let all = by_url(&self.kv_events).into_iter();
        all.map(|(url, events)| (url.clone(), Publisher { events, replay: replay.remove(&url) })).collect()
    }

    /// The engines.
    pub fn engine(&self) -> Engine {
        let nodes = self.admission() == Admission::Node;
        let mooncake = by_url(&self.mooncake);
        Engine { kind: self.engine, nodes, appends: self.sglang_plugin, mooncake }
    }

    /// What is taken out of bodies.
    pub fn strip(&self) -> Strip {
        Strip {
            attribution: self.strip.contains(&Stripped::Attribution),
            cache_control: self.strip.contains(&Stripped::CacheControl),
        }
    }
}

/// A text that is shown to nobody.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text, unless it is empty.
    pub fn get(&self) -> Option<&str> {
        (!self.0.is_empty()).then_some(self.0.as_str())
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "\"\"" } else { "\"***\"" })
    }
}

impl Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if self.0.is_empty() { "" } else { "***" })
    }
}

/// How a prompt's tokens are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Counting {
    /// Canonical bytes, divided by what the lane's `usage` taught.
    Bytes,
    /// The engine's template and tokenizer.
    Tokens,
}

/// `[sessions]`: what is remembered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sessions {
    /// Hours a session is remembered after its last turn, ≥ 1.
    pub ttl_h: u64,
    /// Records kept at most, ≥ 1.
    pub max_records: usize,
    /// Turns of one session at once, ≥ 1.
    pub max_turns: usize,
    /// Lanes per client session, 1 to 4096.
    pub lanes_per_group: usize,
    /// Seconds of rest until a session's actor stops, ≥ 1.
    pub passivate_s: u64,
    /// What `x-codex-turn-state` is signed with; empty = random at each start.
    pub hint_secret: String,
    /// How tokens are counted.
    pub tokens: Counting,
    /// Path of the model's `tokenizer.json`; empty = none.
    pub tokenizer: String,
    /// Path of its chat template; empty = that of the `tokenizer_config.json` beside the tokenizer.
    pub chat_template: String,
}

/// A role of `kvc-router node`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeRole {
    /// Computes prompts for others.
    Prefill,
    /// Holds sessions and decodes.
    Decode,
    /// Takes backups from decode workers.
    PrefillBackupReceiver,
    /// Pushes backups to prefill workers.
    DecodeBackupSender,
}

/// `[node]`: the builtin worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// `host:port` of its HTTP server.
    pub listen: String,
    /// Base URL of the engine it stands beside, of the kind `fleet.engine`; empty for the builtin worker.
    pub engine_url: String,
    /// What it does; not empty.
    pub roles: Vec<NodeRole>,
    /// Model name it serves.
    pub model: String,
    /// `host:port` where KV arrives.
    pub kv_listen: String,
    /// Port where backups arrive, less `rank`; 0 lets the system choose.
    pub d2p_port_base: u16,
    /// Place among the workers of its machine.
    pub rank: u16,
    /// Host memory for backups in tokens; absent = 2·`K_d`.
    pub d2p_host_tokens: Option<Tokens>,
    /// `K_d` in tokens, ≥ 1.
    pub k_d: Tokens,
    /// Stored KV bytes per token, ≥ 8.
    pub kv_bytes_per_token: u32,
    /// Prompt tokens per second of the cost model, > 0.
    pub prefill_tokens_per_s: f64,
    /// Answer tokens per second and sequence of the cost model, > 0.
    pub decode_tokens_per_s: f64,
    /// Speed of time against the cost model, > 0.
    pub time_scale: f64,
}

/// `[demo]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Demo {
    /// P workers.
    pub prefill: u32,
    /// D workers, ≥ 1.
    pub decode: u32,
    /// KV pool of each in tokens, ≥ 1.
    pub k_d: Tokens,
    /// Speed of time against the cost model, > 0.
    pub time_scale: f64,
}
