//! D→P sync as the document states it: when a D pushes, when a backup counts, and what Theorem 4 promises.

use super::cost::CostModel;
use super::options::{D2pTrigger, Options};
use super::types::Tokens;

/// What the options make of D→P sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyncRule {
    /// Push what a turn has committed.
    pub on_commit: bool,
    /// Push what is about to be dropped.
    pub on_evict: bool,
    /// β = 0: a turn ends when its push is acknowledged.
    pub wait: bool,
    /// `β_max` in tokens.
    pub budget: Tokens,
    /// Smallest push in tokens.
    pub batch_min: Tokens,
    block: Tokens,
}

impl SyncRule {
    /// `None`: sync is off, by its trigger or by β = ∞.
    pub fn of(options: &Options) -> Option<Self> {
        let budget = options.d2p_staleness_budget_tokens?;
        let trigger = options.d2p_trigger;
        // β = 0 promises that nothing is ever behind, so every commit is pushed, whatever else is.
        let on_commit = matches!(trigger, D2pTrigger::Commit | D2pTrigger::Both) || budget == 0;
        (trigger != D2pTrigger::Off).then_some(Self {
            on_commit,
            on_evict: matches!(trigger, D2pTrigger::Evict | D2pTrigger::Both),
            wait: budget == 0,
            budget,
            batch_min: options.d2p_sync_batch_min_tokens,
            block: options.block_tokens.into(),
        })
    }

    /// Whether `tokens` are worth a push (the document: at least a page).
    pub fn worth(&self, tokens: Tokens) -> bool {
        tokens > 0 && tokens >= self.batch_min
    }

    /// Whether a backup that is `staleness` tokens behind counts: β = max(page, β_max), since only whole blocks
    /// travel.
    pub fn within(&self, staleness: Tokens) -> bool {
        staleness <= self.budget.max(self.block)
    }
}

/// `staleness(s) = L_D − L_P ≥ 0` for a session of `committed` tokens of which `covered` could be brought back.
pub fn staleness(committed: Tokens, covered: Tokens) -> Tokens {
    committed.saturating_sub(covered)
}

/// A reseed of a session's committed prefix from a backup: the terms of Theorem 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reseed {
    /// `L`: committed length in tokens.
    pub length: Tokens,
    /// Tokens of it that travelled.
    pub transferred: Tokens,
    /// Tokens of it that were computed.
    pub computed: Tokens,
    /// β in tokens.
    pub beta: Tokens,
}

impl Reseed {
    /// `reseed_cost(s)` in ms: the transfer, and the prefill of what the backup lacked. Queueing is not part of it.
    pub fn cost(&self, model: &CostModel) -> f64 {
        model.transfer_ms(self.transferred)
            + model.prefill_ms(self.length.saturating_sub(self.computed), self.computed)
    }

    /// `T_p2d(L)` in ms.
    pub fn transfer_bound(&self, model: &CostModel) -> f64 {
        model.transfer_ms(self.length)
    }

    /// `T_prefill(min(β, L))` in ms, behind the rest of the prefix.
    pub fn prefill_bound(&self, model: &CostModel) -> f64 {
        let new = self.beta.min(self.length);
        model.prefill_ms(self.length - new, new)
    }

    /// Theorem 4: `reseed_cost(s) ≤ T_p2d(L) + T_prefill(min(β, L))`. It presumes staleness ≤ β.
    pub fn holds(&self, model: &CostModel) -> bool {
        self.cost(model) <= self.transfer_bound(model) + self.prefill_bound(model) + 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::cost::{Backup, LadderInput, cheapest, restore_ms};
    use crate::core::types::WorkerId;
    use proptest::prelude::*;

    #[test]
    fn triggers_and_the_ends_of_beta() {
        let rule = |d2p_trigger, d2p_staleness_budget_tokens| {
            SyncRule::of(&Options { d2p_trigger, d2p_staleness_budget_tokens, ..Options::production() })
        };
        assert_eq!(rule(D2pTrigger::Off, Some(4096)), None);
        assert_eq!(rule(D2pTrigger::Both, None), None);
        let commit = rule(D2pTrigger::Commit, Some(4096)).unwrap();
        assert!(commit.on_commit && !commit.on_evict && !commit.wait);
        assert!(commit.within(4096) && !commit.within(4097) && !commit.worth(23) && commit.worth(24));
        let exact = rule(D2pTrigger::Evict, Some(0)).unwrap();
        assert!(exact.on_commit && exact.on_evict && exact.wait && exact.within(24) && !exact.within(25));
    }

    proptest! {
        /// Theorem 4 over all prefixes, backups within β and machines: for a restore, and so for whatever the
        /// ladder prefers to it.
        #[test]
        fn theorem_4(
            length in 1u64..400_000, beta in 0u64..20_000, behind in 0.0f64..=1.0, kept in 0.0f64..=1.0,
            polynomial: bool, link in 1e5f64..1e8,
        ) {
            let base = if polynomial { CostModel::polynomial() } else { CostModel::reference() };
            let model = CostModel { link_bytes_per_ms: link, ..base };
            let computed = (behind * beta.min(length) as f64) as Tokens;
            let held_d = (kept * (length - computed) as f64) as Tokens;
            let transferred = length - computed - held_d;
            let reseed = Reseed { length, transferred, computed, beta };
            prop_assert!(reseed.holds(&model));
            let ladder = LadderInput {
                input_len: length,
                held_d,
                backup: Backup { tokens: transferred, source: Some(WorkerId(0)) },
                prefix_len: length,
                beta,
                ..LadderInput::default()
            };
            let bound = reseed.transfer_bound(&model) + reseed.prefill_bound(&model) + 1e-6;
            if let Some(ms) = restore_ms(&ladder, &model) {
                prop_assert!((ms - reseed.cost(&model)).abs() < 1e-6);
                prop_assert!(cheapest(&ladder, &model).1 <= bound);
            }
        }

        /// Its precondition matters: far enough beyond β it fails.
        #[test]
        fn theorem_4_needs_its_budget(length in 50_000u64..200_000, beta in 0u64..1000) {
            let late = Reseed { length, transferred: 0, computed: length, beta };
            prop_assert!(!late.holds(&CostModel::reference()));
        }
    }
}
