//! What work would cost on a real machine: pure, and the only place where the builtin engine gets its times.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::core::types::Tokens;

/// Speeds of the modelled machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CostModel {
    /// Prompt tokens computed per millisecond. > 0.
    pub prefill_tokens_per_ms: f64,
    /// Fixed cost of a prefill, in ms.
    pub prefill_base_ms: f64,
    /// One decode step, in ms.
    pub decode_ms: f64,
    /// What each other running turn adds to a decode step, in ms.
    pub decode_per_turn_ms: f64,
    /// Prompt tokens computed between two decode steps (chunked prefill); a step beside one waits for it. ≥ 1.
    pub chunk_tokens: Tokens,
    /// KV transfer, in gigabytes (10⁹) per second. > 0.
    pub link_gb_per_s: f64,
    /// KV bytes of a token on the modelled machine; what is really stored and sent is smaller.
    pub kv_bytes_per_token: f64,
    /// How much faster than modelled the clock runs. > 0.
    pub time_scale: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            prefill_tokens_per_ms: 40.0,
            prefill_base_ms: 2.0,
            decode_ms: 6.0,
            decode_per_turn_ms: 0.05,
            chunk_tokens: 512,
            link_gb_per_s: 25.0,
            kv_bytes_per_token: 98_304.0,
            time_scale: 1.0,
        }
    }
}

impl CostModel {
    /// Computing `tokens` of a prompt, without its fixed cost.
    pub fn prefill(&self, tokens: Tokens) -> Duration {
        self.scaled(tokens as f64 / self.prefill_tokens_per_ms)
    }

    /// The fixed cost of a prefill.
    pub fn prefill_base(&self) -> Duration {
        self.scaled(self.prefill_base_ms)
    }

    /// One decode step beside `others` running turns, and beside a prefill chunk if `chunking`.
    pub fn decode_step(&self, others: u32, chunking: bool) -> Duration {
        let chunk = if chunking { self.chunk_tokens as f64 / self.prefill_tokens_per_ms } else { 0.0 };
        self.scaled(self.decode_ms + f64::from(others) * self.decode_per_turn_ms + chunk)
    }

    /// Moving the KV of `tokens` to another machine.
    pub fn transfer(&self, tokens: Tokens) -> Duration {
        let bytes = tokens as f64 * self.kv_bytes_per_token;
        self.scaled(bytes / (self.link_gb_per_s * 1e6))
    }

    /// Names the first value out of range: `(key, value, allowed)`.
    pub fn invalid(&self) -> Option<(&'static str, String, &'static str)> {
        let positive = [
            ("prefill_tokens_per_ms", self.prefill_tokens_per_ms),
            ("link_gb_per_s", self.link_gb_per_s),
            ("time_scale", self.time_scale),
        ];
        let not_negative = [
            ("prefill_base_ms", self.prefill_base_ms),
            ("decode_ms", self.decode_ms),
            ("decode_per_turn_ms", self.decode_per_turn_ms),
            ("kv_bytes_per_token", self.kv_bytes_per_token),
        ];
        let bad = |(key, value): &(&'static str, f64), allowed| (*key, value.to_string(), allowed);
        positive
            .iter()
            .find(|(_, v)| !(v.is_finite() && *v > 0.0))
            .map(|kv| bad(kv, "a number > 0"))
            .or_else(|| {
                not_negative
                    .iter()
                    .find(|(_, v)| !(v.is_finite() && *v >= 0.0))
                    .map(|kv| bad(kv, "a number >= 0"))
            })
            .or_else(|| (self.chunk_tokens < 1).then(|| ("chunk_tokens", "0".into(), "an integer >= 1")))
    }

    fn scaled(&self, ms: f64) -> Duration {
        // A day is longer than any turn; the cut keeps the conversion from failing on extreme scales.
        Duration::from_secs_f64((ms / 1000.0 / self.time_scale).clamp(0.0, 86_400.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_figures() {
        let cost = CostModel::default();
        assert_eq!(cost.prefill(100_000), Duration::from_millis(2500));
        assert_eq!(cost.decode_step(0, false), Duration::from_millis(6));
        assert!(cost.decode_step(0, true) > cost.decode_step(9, false));
        let moved = cost.transfer(100_000).as_secs_f64();
        assert!((0.39..0.40).contains(&moved), "{moved}");
        let fast = CostModel { time_scale: 50.0, ..cost };
        assert_eq!(fast.prefill(100_000), Duration::from_millis(50));
    }

    #[test]
    fn bad_values_are_named() {
        let bad = CostModel { time_scale: 0.0, ..CostModel::default() };
        assert_eq!(bad.invalid().map(|b| b.0), Some("time_scale"));
        let bad = CostModel { decode_ms: f64::NAN, ..CostModel::default() };
        assert_eq!(bad.invalid().map(|b| b.0), Some("decode_ms"));
        assert_eq!(CostModel::default().invalid(), None);
    }
}
