//! When the engine's work is done: the core's cost model at the speed of the node's clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::core::cost::CostModel;
use crate::core::types::Tokens;

/// A modelled machine whose time passes `time_scale` times faster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Clock {
    /// What work costs.
    pub model: CostModel,
    /// How much faster than modelled the clock runs. > 0.
    pub time_scale: f64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { model: CostModel::reference(), time_scale: 1.0 }
    }
}

impl Clock {
    /// Computing `tokens` behind `context` tokens of KV, without the fixed cost of a batch.
    pub fn prefill(&self, context: Tokens, tokens: Tokens) -> Duration {
        let fixed = if tokens == 0 { 0.0 } else { self.model.prefill_fixed };
        self.scaled(self.model.prefill_ms(context, tokens) - fixed)
    }

    /// The fixed cost of a prefill.
    pub fn prefill_base(&self) -> Duration {
        self.scaled(self.model.prefill_fixed)
    }

    /// Prompt tokens computed between two decode steps.
    pub fn chunk_tokens(&self) -> Tokens {
        self.model.chunk_tokens
    }

    /// One decode step beside `others` running turns that hold `active_share` of the pool, and beside a prefill
    /// chunk if `chunking`.
    pub fn decode_step(&self, others: u32, active_share: f64, chunking: bool) -> Duration {
        let chunk = if chunking { self.model.prefill_ms(0, self.model.chunk_tokens) } else { 0.0 };
        self.scaled(self.model.decode_ms(others, active_share) + chunk)
    }

    /// Moving the KV of `tokens` to another machine, without the latency.
    pub fn transfer(&self, tokens: Tokens) -> Duration {
        let latency = if tokens == 0 { 0.0 } else { self.model.link_latency };
        self.scaled(self.model.transfer_ms(tokens) - latency)
    }

    /// Bringing the KV of `tokens` up from this machine's own memory.
    pub fn host(&self, tokens: Tokens) -> Duration {
        self.scaled(self.model.host_ms(tokens))
    }

    /// Real time as µs of modelled time.
    pub fn modelled_us(&self, real: Duration) -> u64 {
        (real.as_secs_f64() * self.time_scale * 1e6) as u64
    }

    /// Names the first value out of range: `(key, value, allowed)`.
    pub fn invalid(&self) -> Option<(&'static str, String, &'static str)> {
        if !(self.time_scale.is_finite() && self.time_scale > 0.0) {
            return Some(("time_scale", self.time_scale.to_string(), "a number > 0"));
        }
        self.model.invalid()
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
    fn the_documents_figures_at_any_speed() {
        let clock = Clock::default();
        assert_eq!(clock.prefill(0, 100_000), Duration::from_millis(2500));
        assert_eq!(clock.decode_step(0, 0.0, false), Duration::from_millis(6));
        assert!(clock.decode_step(0, 0.0, true) > clock.decode_step(9, 0.5, false));
        let moved = clock.transfer(100_000).as_secs_f64();
        assert!((0.39..0.40).contains(&moved), "{moved}");
        assert_eq!((clock.transfer(0), clock.prefill(9, 0)), (Duration::ZERO, Duration::ZERO));
        let fast = Clock { time_scale: 50.0, ..clock };
        assert_eq!(fast.prefill(0, 100_000), Duration::from_millis(50));
    }

    #[test]
    fn bad_values_are_named() {
        let bad = |change: fn(&mut Clock)| {
            let mut clock = Clock::default();
            change(&mut clock);
            clock.invalid().map(|b| b.0)
        };
        assert_eq!(bad(|_| {}), None);
        assert_eq!(bad(|c| c.time_scale = 0.0), Some("time_scale"));
        assert_eq!(bad(|c| c.model.decode_base = f64::NAN), Some("decode_base"));
        assert_eq!(bad(|c| c.model.link_bytes_per_ms = 0.0), Some("link_bytes_per_ms"));
        assert_eq!(bad(|c| c.model.chunk_tokens = 0), Some("chunk_tokens"));
    }
}
