//! The options of the algorithm. Two presets, one code path: every deviation from the letter of the
//! specification is one field here, read in one function (the table in `docs/algorithm.md`).

use serde::{Deserialize, Serialize};

use super::types::{Millis, Tokens};

/// How `overlap(d)` counts (R3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// `|prefix_hashes ∩ resident[d]|`, as written.
    Set,
    /// The longest resident prefix: what an engine can reuse.
    Prefix,
}

/// Who chooses for a session without a usable pin (R4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Algorithm 1's score.
    Spec,
    /// The cheapest worker by seconds of work, head-room and ramp.
    Cost,
}

/// What Admit counts against `ρ·K_d` (A1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accounting {
    /// `used + input_len`, as written: a resident session counts twice.
    Input,
    /// `used − reused + input_len + reserved output`: what the turn really adds.
    Marginal,
}

/// Whether Admit may make room (A2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Eviction {
    /// Never, as written.
    None,
    /// Tail blocks of idle sessions, least likely to return first.
    Blocks,
    /// Tail blocks of idle sessions, longest unused first: what engines do that cannot be told what to evict.
    Lru,
}

/// What an append over `τ_append` on the session's own D is (A3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LargeAppend {
    /// A reject that bumps the counter, as written.
    Reject,
    /// Admitted; the cheapest rung of the ladder computes the missing range.
    Ladder,
}

/// Whether Admit reserves what it grants (A4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reserve {
    /// Check, then act: grants do not count until the KV is there.
    Check,
    /// Every grant is a lease that counts until it is released or expires.
    Lease,
}

/// Where a turn goes that no D admitted (D5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// Blind round-robin Fallback, as written.
    Fallback,
    /// One global bounded wait queue first; then the D with most head-room; 429 or 413 when nothing can fit.
    Queue,
}

/// When pin and residency change (D8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Commit {
    /// At admission, as written (line 9).
    Admit,
    /// When the turn succeeds.
    Success,
}

/// What makes a D push KV to a P.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum D2pTrigger {
    /// Never.
    Off,
    /// After each Direct turn (the sync document).
    Commit,
    /// What D is about to drop.
    Evict,
    /// Both.
    Both,
}

/// Which P workers a D pushes a session's KV to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum D2pTarget {
    /// The P that last served or backed up the session.
    LastP,
    /// One after another, turn by turn.
    RoundRobin,
    /// All of them: any can restore, at a multiple of the bandwidth.
    Broadcast,
}

/// The preset's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// The specification to the letter.
    Paper,
    /// What real agent traces need.
    #[default]
    Production,
}

/// Every parameter of the algorithm. [`Options::paper`] and [`Options::production`] are the presets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// α: bonus in blocks for the pinned D. ≥ 0.
    pub alpha: u32,
    /// `τ_reject`: rejects after which a D is blacklisted for the session. ≥ 1.
    pub tau_reject: u32,
    /// `τ_append` in tokens: longest append served as Direct.
    pub tau_append: Tokens,
    /// ρ: high-water mark as a share of `K_d`. (0, 1].
    pub rho: f64,
    /// ε: admission attempts per turn; `None` = |D|.
    pub epsilon: Option<u32>,
    /// Tokens per block. ≥ 1.
    pub block_tokens: u32,
    /// R3.
    pub overlap: Overlap,
    /// R4.
    pub placement: Placement,
    /// A1.
    pub accounting: Accounting,
    /// A2.
    pub eviction: Eviction,
    /// A3.
    pub large_append: LargeAppend,
    /// A4.
    pub reserve: Reserve,
    /// A5: reserve `min(max_tokens, learned output size)` beside the input.
    pub output_reserve: bool,
    /// D5.
    pub overflow: Overflow,
    /// D6: a completed Fallback may pin when its D reports the session resident.
    pub fallback_pin: bool,
    /// D8.
    pub commit: Commit,
    /// D→P sync.
    pub d2p_trigger: D2pTrigger,
    /// `β_max` in tokens; 0 = wait for the ack; `None` = ∞ (never sync).
    pub d2p_staleness_budget_tokens: Option<Tokens>,
    /// Smallest batch worth a sync, in tokens.
    pub d2p_sync_batch_min_tokens: Tokens,
    /// Where D→P sync goes.
    pub d2p_sync_target_policy: D2pTarget,
    /// How long a granted lease lives unless renewed, in ms.
    pub lease_ms: Millis,
    /// Turns the wait queue holds.
    pub queue_turns: u32,
    /// Longest wait in that queue, in ms.
    pub queue_deadline_ms: Millis,
    /// Ramp of a cold worker, in ms: placement trusts it fully after this long.
    pub ramp_ms: Millis,
}

impl Options {
    /// The specification to the letter (ambiguities settled as `docs/algorithm.md` says).
    pub const fn paper() -> Self {
        Self {
            alpha: 1,
            tau_reject: 3,
            tau_append: 8192,
            rho: 0.95,
            epsilon: None,
            block_tokens: 24,
            overlap: Overlap::Set,
            placement: Placement::Spec,
            accounting: Accounting::Input,
            eviction: Eviction::None,
            large_append: LargeAppend::Reject,
            reserve: Reserve::Check,
            output_reserve: false,
            overflow: Overflow::Fallback,
            fallback_pin: false,
            commit: Commit::Admit,
            d2p_trigger: D2pTrigger::Off,
            d2p_staleness_budget_tokens: Some(4096),
            d2p_sync_batch_min_tokens: 24,
            d2p_sync_target_policy: D2pTarget::LastP,
            lease_ms: 60_000,
            queue_turns: 256,
            queue_deadline_ms: 10_000,
            ramp_ms: 30_000,
        }
    }

    /// What real agent traces need: the default.
    pub const fn production() -> Self {
        Self {
            overlap: Overlap::Prefix,
            placement: Placement::Cost,
            accounting: Accounting::Marginal,
            eviction: Eviction::Blocks,
            large_append: LargeAppend::Ladder,
            reserve: Reserve::Lease,
            output_reserve: true,
            overflow: Overflow::Queue,
            queue_deadline_ms: 30_000,
            fallback_pin: true,
            commit: Commit::Success,
            d2p_trigger: D2pTrigger::Evict,
            ..Self::paper()
        }
    }

    /// The preset of that name.
    pub const fn preset(preset: Preset) -> Self {
        match preset {
            Preset::Paper => Self::paper(),
            Preset::Production => Self::production(),
        }
    }

    /// `ρ·K_d` in whole tokens.
    pub fn high_water(&self, k_d: Tokens) -> Tokens {
        (self.rho * k_d as f64).floor() as Tokens
    }

    /// Whole blocks in `tokens`.
    pub const fn blocks(&self, tokens: Tokens) -> usize {
        (tokens / self.block_tokens as Tokens) as usize
    }

    /// Names the first value out of range: `(key, value, allowed)`.
    pub fn invalid(&self) -> Option<(&'static str, String, &'static str)> {
        if self.tau_reject < 1 {
            return Some(("tau_reject", self.tau_reject.to_string(), "an integer >= 1"));
        }
        if !(self.rho > 0.0 && self.rho <= 1.0) {
            return Some(("rho", self.rho.to_string(), "a number in (0, 1]"));
        }
        if self.epsilon == Some(0) {
            return Some(("epsilon", "0".into(), "an integer >= 1, or absent for |D|"));
        }
        if self.block_tokens < 1 {
            return Some(("block_tokens", self.block_tokens.to_string(), "an integer >= 1"));
        }
        if self.lease_ms < 1 {
            return Some(("lease_ms", self.lease_ms.to_string(), "an integer >= 1"));
        }
        None
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::production()
    }
}
