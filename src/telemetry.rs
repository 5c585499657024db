//! Names of the metrics in one place, the Prometheus recorder, and log output.
//!
//! Logs never hold prompts, answers, header values or keys.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::core::types::Mode;

/// Requests by how they ended: `outcome` and `reason`. Their sum is the number of requests.
pub const REQUESTS: &str = "kvc_requests_total";
/// Requests that ended by being served after they had been placed anew at least once.
pub const REPLACED: &str = "kvc_replaced_total";
/// Streams that went on at another worker.
pub const RESUMED: &str = "kvc_resumed_total";
/// Seconds from a request's arrival to the first byte of its answer, by `outcome`.
pub const TTFT: &str = "kvc_ttft_seconds";
/// Requests being served.
pub const INFLIGHT: &str = "kvc_inflight";
/// Prompt tokens of served turns, from `usage`.
pub const PROMPT_TOKENS: &str = "kvc_prompt_tokens_total";
/// Those of them that were taken from a cache.
pub const CACHED_TOKENS: &str = "kvc_cached_tokens_total";
/// Answer tokens of served turns.
pub const COMPLETION_TOKENS: &str = "kvc_completion_tokens_total";

/// Tokens by which a P's backup is behind its session, by `p`, at the turns that look.
pub const D2P_STALENESS: &str = "kvc_d2p_staleness_tokens";
/// Sessions whose best backup is over β.
pub const D2P_OVER_BUDGET: &str = "kvc_d2p_over_budget_sessions";
/// Turns that had lost residency and found every backup over β. Alert on its rate: sync falls behind.
pub const D2P_BEHIND: &str = "kvc_d2p_behind_total";
/// Reseeds within β that cost more than Theorem 4 allows.
pub const D2P_THEOREM4: &str = "kvc_d2p_theorem4_violations_total";
/// Modelled seconds of a reseed from a backup: `term` is `transfer`, `prefill` or `cost`.
pub const D2P_RESEED: &str = "kvc_d2p_reseed_seconds";
/// Measured reseed cost as a share of Theorem 4's bound, the append included in the cost.
pub const D2P_SLACK: &str = "kvc_d2p_theorem4_share";

/// Tokens of residency that an engine did not have any more, by its own `usage`.
pub const HELD_LESS: &str = "kvc_engine_held_less_tokens_total";

/// Times a D's KV was to go back to a P by the engines' own means, by `result`.
pub const HANDED_BACK: &str = "kvc_d2p_handed_back_total";

const TTFT_BUCKETS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

const TOKEN_BUCKETS: [f64; 10] =
    [0.0, 24.0, 96.0, 384.0, 1024.0, 4096.0, 16384.0, 65536.0, 131072.0, 262144.0];
const SHARE_BUCKETS: [f64; 9] = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0];

static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();

/// The process's metrics as Prometheus text.
///
/// The recorder is installed on the first call. In a process that already has one (an embedder's), that one
/// gets the values and this text stays empty.
pub fn render() -> String {
    handle().render()
}

/// Installs the recorder unless that was done. Values recorded earlier are lost.
pub fn install_metrics() {
    handle();
}

fn handle() -> &'static PrometheusHandle {
    HANDLE.get_or_init(|| {
        let buckets: [(&str, &[f64]); 4] = [
            (TTFT, &TTFT_BUCKETS),
            (D2P_RESEED, &TTFT_BUCKETS),
            (D2P_STALENESS, &TOKEN_BUCKETS),
            (D2P_SLACK, &SHARE_BUCKETS),
        ];
        let builder = buckets.into_iter().fold(PrometheusBuilder::new(), |builder, (name, buckets)| {
            // Fails only without buckets.
            builder.set_buckets_for_metric(Matcher::Full(name.into()), buckets).unwrap_or_default()
        });
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("another metrics recorder is installed; /metrics stays empty");
        }
        describe();
        begin();
        handle
    })
}

fn describe() {
    describe_counter!(REQUESTS, "Requests by outcome and reason");
    describe_counter!(REPLACED, "Requests served after they were placed anew");
    describe_counter!(RESUMED, "Streams that went on at another worker");
    describe_histogram!(TTFT, Unit::Seconds, "Arrival to first byte of the answer");
    describe_gauge!(INFLIGHT, "Requests being served");
    describe_counter!(PROMPT_TOKENS, "Prompt tokens of served turns");
    describe_counter!(CACHED_TOKENS, "Prompt tokens taken from a cache");
    describe_counter!(COMPLETION_TOKENS, "Answer tokens of served turns");
    describe_counter!(HANDED_BACK, "Times KV was to go from D back to P, by result");
    describe_counter!(HELD_LESS, "Tokens that engines held less than expected");
    describe_histogram!(D2P_STALENESS, "Tokens by which a P's backup is behind");
    describe_gauge!(D2P_OVER_BUDGET, "Sessions whose best backup is over beta");
    describe_counter!(D2P_BEHIND, "Turns that found every backup over beta");
    describe_counter!(D2P_THEOREM4, "Reseeds that cost more than Theorem 4 allows");
    describe_histogram!(D2P_RESEED, Unit::Seconds, "Terms of a reseed from a backup");
    describe_histogram!(D2P_SLACK, "Reseed cost as a share of Theorem 4's bound");
}

/// Counts from zero: whoever scrapes before the first request sees that there was none.
fn begin() {
    for mode in [Mode::Direct, Mode::Seed, Mode::Reseed, Mode::Fallback].map(Mode::as_str) {
        counter!(REQUESTS, "outcome" => mode, "reason" => "append").absolute(0);
    }
    for outcome in ["rejected", "failed"] {
        counter!(REQUESTS, "outcome" => outcome, "reason" => "none").absolute(0);
    }
    for name in [REPLACED, RESUMED, PROMPT_TOKENS, CACHED_TOKENS, COMPLETION_TOKENS, D2P_BEHIND, D2P_THEOREM4]
    {
        counter!(name).absolute(0);
    }
    gauge!(INFLIGHT).increment(0.0);
    gauge!(D2P_OVER_BUDGET).increment(0.0);
}

/// One gauge of the moment as Prometheus text; each sample with its labels, written as `name="value",…`.
pub fn gauge_text(name: &str, help: &str, samples: impl IntoIterator<Item = (String, f64)>) -> String {
    let mut text = format!("# HELP {name} {help}\n# TYPE {name} gauge\n");
    for (labels, value) in samples {
        // Writing to a string cannot fail.
        let _ = match labels.is_empty() {
            true => writeln!(text, "{name} {value}"),
            false => writeln!(text, "{name}{{{labels}}} {value}"),
        };
    }
    text
}

/// Counts a request's end.
pub fn request_ended(outcome: &'static str, reason: &'static str) {
    counter!(REQUESTS, "outcome" => outcome, "reason" => reason).increment(1);
}

/// Counts a request up (`true`) or down.
pub fn inflight(up: bool) {
    gauge!(INFLIGHT).increment(if up { 1.0 } else { -1.0 });
}

/// Records the time to a first byte.
pub fn first_byte(outcome: &'static str, after: Duration) {
    histogram!(TTFT, "outcome" => outcome).record(after);
    upkeep();
}

fn upkeep() {
    static RECORDED: AtomicU64 = AtomicU64::new(0);
    // The exporter keeps raw values until somebody scrapes; nobody may.
    if RECORDED.fetch_add(1, Ordering::Relaxed) % 4096 == 4095 {
        handle().run_upkeep();
    }
}

/// Counts the tokens of a served turn.
pub fn tokens(prompt: Option<u64>, cached: Option<u64>, completion: Option<u64>) {
    for (name, value) in [(PROMPT_TOKENS, prompt), (CACHED_TOKENS, cached), (COMPLETION_TOKENS, completion)] {
        if let Some(value) = value {
            counter!(name).increment(value);
        }
    }
}

/// Records how far a P's backup is behind its session.
pub fn d2p_staleness(p: &str, tokens: u64) {
    histogram!(D2P_STALENESS, "p" => p.to_owned()).record(tokens as f64);
    upkeep();
}

/// Counts a session over β up (`true`) or down.
pub fn d2p_over_budget(over: bool) {
    gauge!(D2P_OVER_BUDGET).increment(if over { 1.0 } else { -1.0 });
}

/// Counts a turn that found every backup over β.
pub fn d2p_behind() {
    counter!(D2P_BEHIND).increment(1);
}

/// Counts a violation of Theorem 4.
pub fn d2p_theorem4() {
    counter!(D2P_THEOREM4).increment(1);
}

/// Records the measured terms of a reseed and their share of the bound, in modelled ms.
pub fn d2p_reseed(transfer: f64, prefill: f64, bound: f64) {
    for (term, ms) in [("transfer", transfer), ("prefill", prefill), ("cost", transfer + prefill)] {
        histogram!(D2P_RESEED, "term" => term).record(ms / 1000.0);
    }
    histogram!(D2P_SLACK).record((transfer + prefill) / bound.max(f64::MIN_POSITIVE));
    upkeep();
}

/// Counts residency that an engine did not have any more.
pub fn held_less(tokens: u64) {
    counter!(HELD_LESS).increment(tokens);
}

/// Counts a handing back of KV by its result.
pub fn handed_back(result: &'static str) {
    counter!(HANDED_BACK, "result" => result).increment(1);
}

/// Counts a served turn that had been placed anew.
pub fn replaced() {
    counter!(REPLACED).increment(1);
}

/// Counts a stream that went on at another worker.
pub fn resumed() {
    counter!(RESUMED).increment(1);
}

/// Sends logs to standard error, filtered by `KVC_LOG`, else `RUST_LOG`, else by `otherwise`. Does nothing in a
/// process that has a subscriber already.
pub fn install_logs(otherwise: &str) {
    let filter = EnvFilter::try_from_env("KVC_LOG")
        .or_else(|_| EnvFilter::try_from_default_env())
        .unwrap_or_else(|_| EnvFilter::new(otherwise));
    let colours = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_ansi(colours).with_env_filter(filter);
    let _ = logs.with_writer(std::io::stderr).try_init();
}

/// What a service logs: workers coming and going, turns placed anew, faults.
pub const SERVICE_LOGS: &str = "info,actix_server=warn";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installing_twice_is_harmless_and_values_are_rendered() {
        install_metrics();
        install_metrics();
        install_logs(SERVICE_LOGS);
        install_logs(SERVICE_LOGS);
        request_ended("direct", "append");
        first_byte("direct", Duration::from_millis(3));
        tokens(Some(3), None, Some(1));
        let text = render();
        assert!(text.contains("kvc_requests_total{outcome=\"direct\",reason=\"append\"}"), "{text}");
        assert!(text.contains("kvc_ttft_seconds_bucket"), "{text}");
    }
}
