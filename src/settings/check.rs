//! Ranges that types cannot say.

use std::collections::HashSet;
use std::net::ToSocketAddrs as _;

use http::Uri;

use super::keys::ApiKey;
use super::{Admission, Counting, Settings, Spoken};
use crate::engines::EngineKind;

/// `(key, value as TOML, what is allowed)`.
pub(super) type Invalid = (String, String, String);

/// The first value out of range.
pub(super) fn invalid(settings: &Settings) -> Option<Invalid> {
    algorithm(settings)
        .or_else(|| http(settings))
        .or_else(|| fleet(settings))
        .or_else(|| sessions(settings))
        .or_else(|| node(settings))
        .or_else(|| demo(settings))
}

fn algorithm(s: &Settings) -> Option<Invalid> {
    let (key, value, allowed) = s.options.invalid()?;
    Some((format!("algorithm.{key}"), value, allowed.to_owned()))
}

fn http(s: &Settings) -> Option<Invalid> {
    let http = &s.http;
    listen("http.listen", &http.listen)
        .or_else(|| range("http.body_limit_mib", http.body_limit_mib as u64, 1, 1024))
        .or_else(|| range("http.workers", http.workers as u64, 0, 1024))
        .or_else(|| at_least_1("http.max_connections", http.max_connections as u64))
        .or_else(|| at_least_1("http.max_inflight", http.max_inflight as u64))
        .or_else(|| range("http.keep_alive_s", http.keep_alive_s, 0, MAX_SECONDS))
        .or_else(|| range("http.request_timeout_s", http.request_timeout_s, 1, MAX_SECONDS))
        .or_else(|| range("http.first_byte_timeout_s", http.first_byte_timeout_s, 1, MAX_SECONDS))
        .or_else(|| range("http.idle_timeout_s", http.idle_timeout_s, 1, MAX_SECONDS))
        .or_else(|| range("http.drain_delay_s", http.drain_delay_s, 0, MAX_SECONDS))
        .or_else(|| range("http.drain_s", http.drain_s, 0, MAX_SECONDS))
        .or_else(|| front(s))
}

/// Who may ask, and over what.
fn front(s: &Settings) -> Option<Invalid> {
    let http = &s.http;
    if !http.admin_listen.is_empty()
        && let Some(bad) = listen("http.admin_listen", &http.admin_listen)
    {
        return Some(bad);
    }
    let bad_key = http.keys.iter().find_map(|line| line.parse::<ApiKey>().err());
    if let Some(problem) = bad_key {
        return Some(("http.keys".into(), "...".into(), problem));
    }
    if http.tls_cert.is_empty() != http.tls_key.is_empty() {
        let (missing, given) = match http.tls_cert.is_empty() {
            true => ("http.tls_cert", "http.tls_key"),
            false => ("http.tls_key", "http.tls_cert"),
        };
        return Some((missing.into(), "\"\"".into(), format!("a PEM file, as `{given}` is set")));
    }
    if s.fleet.worker_key.get().is_some_and(|key| !key.bytes().all(|b| b.is_ascii_graphic())) {
        return Some(("fleet.worker_key".into(), "\"***\"".into(), "visible ASCII without spaces".into()));
    }
    None
}

const CHAT_TOO: &str = "\"chat\" is what the other APIs are translated to; every engine must speak it";

/// A day: longer waits are mistakes in the unit.
const MAX_SECONDS: u64 = 86_400;

fn fleet(s: &Settings) -> Option<Invalid> {
    let fleet = &s.fleet;
    at_least_1("fleet.admit_timeout_ms", fleet.admit_timeout_ms)
        .or_else(|| at_least_1("fleet.connect_timeout_ms", fleet.connect_timeout_ms))
        .or_else(|| range("fleet.breaker_open_ms", fleet.breaker_open_ms, 1, 1000 * MAX_SECONDS))
        .or_else(|| fleet.k_d.and_then(|k_d| at_least_1("fleet.k_d", k_d)))
        .or_else(|| admission(s))
        .or_else(|| kv_events(s))
        .or_else(|| urls("fleet.prefill", &fleet.prefill))
        .or_else(|| sglang_plugin(s))
        .or_else(|| mooncake(s))
        .or_else(|| pairs(s))
        .or_else(|| urls("fleet.decode", &fleet.decode))
        .or_else(|| {
            let mute = !fleet.apis.is_empty() && !fleet.apis.contains(&Spoken::Chat);
            mute.then(|| ("fleet.apis".into(), "a list without \"chat\"".into(), CHAT_TOO.into()))
        })
}

/// Builtin workers decide for themselves; nobody can decide for them.
fn admission(s: &Settings) -> Option<Invalid> {
    let wrong = s.fleet.engine.capabilities().admits && s.fleet.admission() == Admission::Local;
    let allowed = "\"node\" or \"auto\" with this `fleet.engine`";
    wrong.then(|| ("fleet.admission".into(), "\"local\"".into(), allowed.into()))
}

fn kv_events(s: &Settings) -> Option<Invalid> {
    let ok = |entry: &&String| {
        let Some((url, at)) = entry.split_once('=') else { return false };
        let at = at.strip_prefix("bind:").unwrap_or(at);
        let port = at.strip_prefix("tcp://").and_then(|at| at.rsplit_once(':'));
        is_base_url(url) && port.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
    };
    if let Some(wrong) = s.fleet.kv_events.iter().find(|entry| !ok(entry)) {
        let allowed = "entries such as \"http://10.0.0.5:8000=tcp://10.0.0.5:5557\" (\"…=bind:tcp://0.0.0.0:5557\" where \
                       the engine connects)";
        return Some(("fleet.kv_events".into(), format!("{wrong:?}"), allowed.into()));
    }
    let known = s.fleet.kv_events();
    let of_known = |entry: &str| {
        entry.split_once('=').is_some_and(|(url, _)| known.contains_key(url.trim_end_matches('/')))
    };
    let wrong =
        s.fleet.kv_replay.iter().find(|entry| !ok(entry) || entry.contains("=bind:") || !of_known(entry))?;
    let allowed = "entries such as \"http://10.0.0.5:8000=tcp://10.0.0.5:5558\", of engines that are in `fleet.kv_events`";
    Some(("fleet.kv_replay".into(), format!("{wrong:?}"), allowed.into()))
}

fn mooncake(s: &Settings) -> Option<Invalid> {
    let ok =
        |entry: &&String| entry.split_once('=').is_some_and(|(url, at)| is_base_url(url) && is_base_url(at));
    let key = "fleet.mooncake";
    if s.fleet.engine != EngineKind::Vllm && !s.fleet.mooncake.is_empty() {
        let allowed = "[] without `fleet.engine = \"vllm\"`";
        return Some((key.into(), format!("{:?}", s.fleet.mooncake), allowed.into()));
    }
    if let Some(wrong) = s.fleet.mooncake.iter().find(|entry| !ok(entry)) {
        let allowed = "entries such as \"http://10.0.0.5:8000=http://10.0.0.5:8998\"";
        return Some((key.into(), format!("{wrong:?}"), allowed.into()));
    }
    let known = s.fleet.engine().mooncake;
    let missing =
        s.fleet.prefill.iter().find(|url| !known.is_empty() && !known.contains_key(url.as_str()))?;
    let allowed = format!("an entry for each prefill worker; {missing:?} has none");
    Some((key.into(), format!("{:?}", s.fleet.mooncake), allowed))
}

fn sglang_plugin(s: &Settings) -> Option<Invalid> {
    let wrong = s.fleet.sglang_plugin && s.fleet.engine != EngineKind::Sglang;
    let allowed = "false without `fleet.engine = \"sglang\"`";
    wrong.then(|| ("fleet.sglang_plugin".into(), "true".into(), allowed.into()))
}

fn pairs(s: &Settings) -> Option<Invalid> {
    let fleet = &s.fleet;
    let alone = fleet.prefill.first().filter(|_| !fleet.engine.capabilities().pairs)?;
    let allowed = format!(
        "none with `fleet.engine = \"{}\"`: its workers compute their prompts",
        fleet.engine.as_str()
    );
    Some(("fleet.prefill".into(), format!("{alone:?}"), allowed))
}

fn sessions(s: &Settings) -> Option<Invalid> {
    let sessions = &s.sessions;
    range("sessions.ttl_h", sessions.ttl_h, 1, 24 * 365)
        .or_else(|| at_least_1("sessions.max_records", sessions.max_records as u64))
        .or_else(|| at_least_1("sessions.max_turns", sessions.max_turns as u64))
        .or_else(|| range("sessions.lanes_per_group", sessions.lanes_per_group as u64, 1, 4096))
        .or_else(|| range("sessions.passivate_s", sessions.passivate_s, 1, MAX_SECONDS))
        .or_else(|| tokens(s))
}

fn tokens(s: &Settings) -> Option<Invalid> {
    if s.sessions.tokens != Counting::Tokens {
        return None;
    }
    if !s.fleet.engine.capabilities().tokenizer {
        let allowed = "\"bytes\": a token of the builtin worker is four bytes";
        return Some(("sessions.tokens".into(), "\"tokens\"".into(), allowed.into()));
    }
    let allowed = "the path of the model's tokenizer.json (sessions.tokens = \"tokens\" needs it)";
    s.sessions.tokenizer.is_empty().then(|| ("sessions.tokenizer".into(), "\"\"".into(), allowed.into()))
}

fn node(s: &Settings) -> Option<Invalid> {
    let node = &s.node;
    if node.roles.is_empty() {
        return Some(("node.roles".into(), "[]".into(), "one or more of `prefill`, `decode`, ...".into()));
    }
    if node.model.is_empty() {
        return Some(("node.model".into(), "\"\"".into(), "a model name".into()));
    }
    engine_url(s)
        .or_else(|| listen("node.listen", &node.listen))
        .or_else(|| listen("node.kv_listen", &node.kv_listen))
        .or_else(|| range("node.rank", node.rank.into(), 0, u64::from(u16::MAX - node.d2p_port_base)))
        .or_else(|| at_least_1("node.k_d", node.k_d))
        .or_else(|| range("node.kv_bytes_per_token", node.kv_bytes_per_token.into(), 8, u32::MAX.into()))
        .or_else(|| positive("node.prefill_tokens_per_s", node.prefill_tokens_per_s))
        .or_else(|| positive("node.decode_tokens_per_s", node.decode_tokens_per_s))
        .or_else(|| positive("node.time_scale", node.time_scale))
}

fn engine_url(s: &Settings) -> Option<Invalid> {
    let url = &s.node.engine_url;
    let allowed = "a base URL such as \"http://127.0.0.1:8000\", or \"\"";
    (!url.is_empty() && !is_base_url(url))
        .then(|| ("node.engine_url".into(), format!("{url:?}"), allowed.into()))
}

fn demo(s: &Settings) -> Option<Invalid> {
    range("demo.prefill", s.demo.prefill.into(), 0, 64)
        .or_else(|| range("demo.decode", s.demo.decode.into(), 1, 64))
        .or_else(|| at_least_1("demo.k_d", s.demo.k_d))
        .or_else(|| positive("demo.time_scale", s.demo.time_scale))
}

fn range(key: &str, value: u64, min: u64, max: u64) -> Option<Invalid> {
    (!(min..=max).contains(&value))
        .then(|| (key.into(), value.to_string(), format!("an integer from {min} to {max}")))
}

fn at_least_1(key: &str, value: u64) -> Option<Invalid> {
    (value < 1).then(|| (key.into(), value.to_string(), "an integer >= 1".into()))
}

fn positive(key: &str, value: f64) -> Option<Invalid> {
    (!(value.is_finite() && value > 0.0)).then(|| (key.into(), value.to_string(), "a number > 0".into()))
}

fn listen(key: &str, value: &str) -> Option<Invalid> {
    let ok =
        value.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    (!ok).then(|| (key.into(), format!("{value:?}"), "host:port, e.g. \"127.0.0.1:8080\"".into()))
}

fn urls(key: &str, urls: &[String]) -> Option<Invalid> {
    let mut seen = HashSet::new();
    let bad = |url: &String, allowed: &str| Some((key.into(), format!("{url:?}"), allowed.into()));
    for url in urls {
        if !is_base_url(url) {
            return bad(url, "base URLs such as \"http://10.0.0.5:8101\"");
        }
        if !seen.insert(url) {
            return bad(url, "each worker once");
        }
    }
    None
}

/// Whether only this machine reaches an address (`host:port`).
pub fn is_loopback(listen: &str) -> bool {
    let found: Vec<_> = listen.to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    !found.is_empty() && found.iter().all(|addr| addr.ip().is_loopback())
}

/// Whether a worker may be reached at such a URL.
pub fn is_base_url(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.authority().is_some_and(|a| !a.host().is_empty() && !a.as_str().contains('@'));
    matches!(uri.scheme_str(), Some("http" | "https")) && host && uri.query().is_none()
}
