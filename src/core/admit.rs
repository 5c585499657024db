//! Algorithm 2 (Admit): may this D take this turn?
//!
//! The decision is a function of [`AdmitTerms`] alone. The worker fills them from its own truth
//! ([`super::ledger`]), echoes them in its answer, and `explain` replays them.

use serde::{Deserialize, Serialize};

use super::options::{Accounting, Eviction, LargeAppend, Options};
use super::types::{Mode, RejectReason, Tokens};

/// What Admit decides from. All lengths in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct AdmitTerms {
    /// `K_d`.
    pub k_d: Tokens,
    /// Line 1. `input` accounting: `Σ resident_tokens(s', d)`. `marginal`: KV held plus what leases reserve.
    pub used: Tokens,
    /// Whether `s(r) ∈ M_d`.
    pub resident: bool,
    /// Longest prefix of the prompt that D holds (whole blocks).
    pub reused: Tokens,
    /// `append_len(r)` as D sees it.
    pub append_len: Tokens,
    /// `input_len(r)`.
    pub input_len: Tokens,
    /// `t(r)`.
    pub turn: u32,
    /// Output tokens to reserve (A5); 0 when the option is off.
    pub output_reserve: Tokens,
    /// KV of idle sessions that eviction could free.
    pub evictable: Tokens,
}

/// The answer of Algorithm 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `⟨True, mode, ∅⟩`.
    Admit {
        /// Direct, Seed or Reseed.
        mode: Mode,
        /// Tokens the reservation takes from the pool.
        take: Tokens,
        /// Tokens that must be evicted first, in the same step.
        evict: Tokens,
    },
    /// `⟨False, ⊥, reason⟩`.
    Reject(RejectReason),
}

/// Algorithm 2.
pub fn admit(terms: &AdmitTerms, options: &Options) -> Verdict {
    let take = take(terms, options);
    let over = (terms.used + take).saturating_sub(options.high_water(terms.k_d)); // line 2
    let cap_ok = over <= if may_evict(options) { terms.evictable } else { 0 };
    // ρ bounds what cannot give way. Idle KV can, whenever an answer outgrows its reservation, so it may fill the pool.
    let evict = (terms.used + take).saturating_sub(terms.k_d);
    let admitted = |mode| Verdict::Admit { mode, take, evict };

    if terms.resident {
        if terms.append_len <= options.tau_append && cap_ok {
            admitted(Mode::Direct) // line 5
        } else if terms.append_len > options.tau_append && large_append_rejects(options) {
            Verdict::Reject(RejectReason::RealLargeAppend) // line 7
        } else if cap_ok {
            admitted(Mode::Reseed) // A3: same D, a cheaper rung for the missing range
        } else {
            Verdict::Reject(RejectReason::NoDCapacity) // line 9
        }
    } else if cap_ok {
        admitted(if terms.turn == 0 { Mode::Seed } else { Mode::Reseed }) // line 12
    } else {
        Verdict::Reject(RejectReason::SessionNotResidentNoCapacity) // line 15
    }
}

/// Whether the turn could be admitted by this D if nothing else were on it.
pub fn fits_when_empty(input_len: Tokens, output_reserve: Tokens, k_d: Tokens) -> bool {
    input_len + output_reserve <= k_d
}

/// A1, A5: what the turn adds to `used`. `marginal` counts whole blocks, as the pool does.
fn take(terms: &AdmitTerms, options: &Options) -> Tokens {
    let output = if options.output_reserve { terms.output_reserve } else { 0 };
    match options.accounting {
        Accounting::Input => terms.input_len + output,
        Accounting::Marginal => {
            let held = (terms.input_len + output).next_multiple_of(options.block_tokens.into());
            held.saturating_sub(terms.reused)
        }
    }
}

/// A2: whether Admit may make room.
pub fn may_evict(options: &Options) -> bool {
    options.eviction != Eviction::None
}

/// A3.
fn large_append_rejects(options: &Options) -> bool {
    options.large_append == LargeAppend::Reject
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const K: Tokens = 10_000; // high water 9_500

    fn terms() -> AdmitTerms {
        AdmitTerms { k_d: K, turn: 1, input_len: 1000, append_len: 100, ..Default::default() }
    }

    fn direct(terms: &AdmitTerms, options: &Options) -> bool {
        matches!(admit(terms, options), Verdict::Admit { mode: Mode::Direct, .. })
    }

    #[test]
    fn capacity_boundary_is_inclusive() {
        let o = Options::paper();
        let at = AdmitTerms { resident: true, used: 8500, ..terms() };
        assert!(direct(&at, &o));
        let over = AdmitTerms { used: 8501, ..at };
        assert_eq!(admit(&over, &o), Verdict::Reject(RejectReason::NoDCapacity));
        let cold = AdmitTerms { resident: false, ..over };
        assert_eq!(admit(&cold, &o), Verdict::Reject(RejectReason::SessionNotResidentNoCapacity));
    }

    #[test]
    fn append_boundary_is_inclusive_and_size_is_named_before_capacity() {
        let o = Options::paper();
        let at = AdmitTerms { resident: true, append_len: o.tau_append, ..terms() };
        assert!(direct(&at, &o));
        let over = AdmitTerms { append_len: o.tau_append + 1, used: K, ..at };
        assert_eq!(admit(&over, &o), Verdict::Reject(RejectReason::RealLargeAppend));
    }

    #[test]
    fn turn_zero_seeds_and_later_turns_reseed() {
        let o = Options::paper();
        let mode = |turn| match admit(&AdmitTerms { turn, ..terms() }, &o) {
            Verdict::Admit { mode, .. } => Some(mode),
            Verdict::Reject(_) => None,
        };
        assert_eq!((mode(0), mode(1)), (Some(Mode::Seed), Some(Mode::Reseed)));
    }

    /// A1: a resident session of 6 000 in a pool of 10 000 is never Direct under `input`, always under `marginal`.
    #[test]
    fn marginal_accounting_counts_a_resident_session_once() {
        let t = AdmitTerms { resident: true, used: 6000, reused: 6000, input_len: 6100, ..terms() };
        assert_eq!(admit(&t, &Options::paper()), Verdict::Reject(RejectReason::NoDCapacity));
        let marginal = Options { accounting: Accounting::Marginal, ..Options::paper() };
        assert_eq!(admit(&t, &marginal), Verdict::Admit { mode: Mode::Direct, take: 120, evict: 0 });
    }

    /// A2: what is evictable counts as room up to ρ; evicted is only what the pool lacks.
    #[test]
    fn eviction_covers_the_shortfall() {
        let t = AdmitTerms { used: 9400, evictable: 900, ..terms() };
        let o = Options { eviction: Eviction::Blocks, ..Options::paper() };
        assert_eq!(admit(&t, &o), Verdict::Admit { mode: Mode::Reseed, take: 1000, evict: 400 });
        let t = AdmitTerms { evictable: 899, ..t };
        assert!(matches!(admit(&t, &o), Verdict::Reject(_)));
        assert!(matches!(admit(&t, &Options::paper()), Verdict::Reject(_)));
    }

    /// A3: with the ladder a large append stays on its D as a Reseed.
    #[test]
    fn large_append_takes_the_ladder_in_production() {
        let t = AdmitTerms { resident: true, append_len: 9000, ..terms() };
        let o = Options { large_append: LargeAppend::Ladder, ..Options::paper() };
        assert_eq!(admit(&t, &o), Verdict::Admit { mode: Mode::Reseed, take: 1000, evict: 0 });
    }

    /// A5: the output reservation counts only when the option is on.
    #[test]
    fn output_is_reserved_when_asked() {
        let t = AdmitTerms { used: 8500, output_reserve: 1, ..terms() };
        assert!(matches!(admit(&t, &Options::paper()), Verdict::Admit { .. }));
        let o = Options { output_reserve: true, ..Options::paper() };
        assert!(matches!(admit(&t, &o), Verdict::Reject(_)));
    }

    proptest! {
        /// Invariant 1: whatever is admitted, what cannot be evicted plus what the turn takes stays ≤ ρ·K_d, and all
        /// that is held ≤ K_d.
        #[test]
        fn never_silently_overloaded(
            k_d in 1u64..200_000, used in 0u64..250_000, input_len in 0u64..250_000,
            reused in 0u64..250_000, append_len in 0u64..20_000, output_reserve in 0u64..5000,
            evictable in 0u64..250_000, resident: bool, turn in 0u32..3, production: bool,
        ) {
            let o = if production { Options::production() } else { Options::paper() };
            let t = AdmitTerms {
                k_d, used, resident, reused: reused.min(input_len), append_len, input_len, turn,
                output_reserve, evictable: evictable.min(used),
            };
            if let Verdict::Admit { take, evict, .. } = admit(&t, &o) {
                prop_assert!(evict <= t.evictable);
                prop_assert!(used.saturating_sub(t.evictable) + take <= o.high_water(k_d));
                prop_assert!(used - evict + take <= k_d);
                prop_assert!(take + reused.min(input_len) >= input_len);
                if !production {
                    prop_assert_eq!((evict, take), (0, input_len));
                }
            }
        }
    }
}
