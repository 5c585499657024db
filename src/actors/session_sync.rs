//! The session actor's part in D→P sync: what a turn finds, what it may restore, and what a reseed has cost.

use super::{Fleet, Running, SessionActorState, TurnKey};
use crate::actors::backup::{offer, stale};
use crate::core::cost::Backup;
use crate::core::options::Options;
use crate::core::sync::{Reseed, SyncRule};
use crate::core::turn::Dispatch;
use crate::core::types::{Mode, Rung, Tokens};
use crate::telemetry;
use crate::wire::plan::Report;

impl Running {
    /// What the session's last turn left, in tokens.
    fn committed(&self) -> Tokens {
        self.request.input_len.saturating_sub(self.request.append_len)
    }

    /// A restore's range, from what D really holds: it may hold less or more than when it was scored. A plan whose
    /// backup does not reach behind that is computed by D.
    pub(super) fn restorable(&self, plan: Dispatch) -> (Dispatch, u32) {
        if plan.rung != Rung::Restore {
            return (plan, 0);
        }
        let holding = self.holdings.iter().find(|h| Some(h.p) == plan.prefill);
        match holding.and_then(|h| h.end_behind(plan.reuse_blocks)) {
            Some(end) => (plan, end - plan.reuse_blocks),
            None => (Dispatch { rung: Rung::Local, prefill: None, ..plan }, 0),
        }
    }
}

impl SessionActorState {
    /// Measures the backups of a session that comes back, and offers them to the D workers.
    pub(super) fn look_at_backups(&mut self, turn: TurnKey, fleet: &mut Fleet) {
        let options = self.shared.config.options.clone();
        let Some(running) = self.turns.get_mut(&turn) else { return };
        let (committed, first) = (running.committed(), running.holdings.is_empty());
        offer(fleet, committed, &options);
        if running.no_restore {
            fleet.decode.iter_mut().for_each(|d| d.backup = Backup::default());
        }
        running.holdings.clone_from(&fleet.holdings);
        // Once per turn: a turn that waits or is placed again finds the same.
        if first && running.request.turn > 0 && committed > 0 && !fleet.holdings.is_empty() {
            self.measure(fleet, committed, &options);
        }
    }

    fn measure(&mut self, fleet: &Fleet, committed: Tokens, options: &Options) {
        let Some(rule) = SyncRule::of(options) else { return };
        let block = Tokens::from(options.block_tokens);
        let kept = fleet.decode.iter().map(|d| d.overlap).max().unwrap_or(0);
        let lost = Tokens::from(kept) * block + block <= committed;
        if !lost && !rule.on_commit {
            return;
        }
        // A resident session's staleness is that of P's copy alone; it is reported, but no risk.
        let behind = |kept| stale(&fleet.holdings, kept, committed, block);
        let from = if lost { kept } else { 0 };
        for (p, tokens) in behind(from) {
            if let Some(slot) = self.shared.worker(p) {
                telemetry::d2p_staleness(&slot.at.name, tokens);
            }
        }
        let best = behind(from).map(|(_, tokens)| tokens).min().unwrap_or(committed);
        let meter = &self.shared.sync;
        if std::mem::take(&mut self.pushes) {
            // The last, partial block never travels.
            meter.pushed(best < block.max(rule.batch_min) + block);
        }
        self.shared.lost.found(&self.id, !rule.within(best));
        if lost {
            meter.found(best);
            if !rule.within(best) {
                meter.behind();
            }
        }
    }

    /// Checks Theorem 4 on a reseed from a backup.
    pub(super) fn reported(&mut self, turn: TurnKey, report: &Report) {
        let Some(running) = self.turns.get(&turn) else { return };
        let Some(plan) = running.machine.running() else { return };
        let Some(rule) = SyncRule::of(&self.shared.config.options) else { return };
        if plan.mode != Mode::Reseed || !matches!(plan.rung, Rung::Restore | Rung::Backup) {
            return;
        }
        let (length, append) = (running.committed(), running.request.append_len);
        let computed = (report.computed + report.computed_remote).saturating_sub(append);
        let beta = rule.budget.max(self.shared.config.options.block_tokens.into());
        let reseed = Reseed { length, transferred: report.transferred.min(length), computed, beta };
        let ms = |us: u64| us as f64 / 1000.0;
        let (transfer, prefill) = (ms(report.transfer_us), ms(report.compute_us));
        self.shared.sync.reseeded(&reseed, transfer, prefill, &self.shared.config.cost);
    }
}
