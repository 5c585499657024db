//! β as a measured contract: what D→P sync has achieved so far, over all sessions of one router.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::core::cost::CostModel;
use crate::core::sync::Reseed;
use crate::core::types::{Rung, Tokens};
use crate::telemetry;

/// Upper ends of the staleness buckets: 0, then 24 · 2^k tokens.
const BUCKETS: usize = 20;

/// See the module.
#[derive(Debug, Default)]
pub struct SyncMeter {
    stale: [AtomicU64; BUCKETS],
    issued: AtomicU64,
    in_time: AtomicU64,
    beta_violations: AtomicU64,
    theorem4_violations: AtomicU64,
    reseeds: AtomicU64,
    backup_hits: AtomicU64,
    delta: AtomicU64,
    over: AtomicU64,
}

/// What a [`SyncMeter`] shows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SyncFigures {
    /// Of the turns whose session had been pushed: those that found the push complete, in %. 100 without any.
    pub synced_before_next_turn_pct: f64,
    /// Median staleness of sessions that had lost residency, in tokens (upper end of its bucket).
    pub staleness_p50: Tokens,
    /// The 99th percentile of it.
    pub staleness_p99: Tokens,
    /// Turns that had lost residency and found every backup over β.
    pub beta_violations: u64,
    /// Reseeds within β that cost more than Theorem 4 allows, queueing apart.
    pub theorem4_violations: u64,
    /// Turns served as Reseed.
    pub reseeds: u64,
    /// Of these: from a backup (`restore` and `backup`).
    pub backup_hits: u64,
    /// Of these: `delta`.
    pub delta: u64,
    /// Sessions over β now.
    pub over_budget: u64,
}

/// A session over β, until dropped.
#[derive(Debug)]
pub struct OverBudget(Arc<SyncMeter>);

impl Drop for OverBudget {
    fn drop(&mut self) {
        self.0.over.fetch_sub(1, Relaxed);
        telemetry::d2p_over_budget(false);
    }
}

impl SyncMeter {
    /// Counts a session over β.
    pub fn over_budget(self: &Arc<Self>) -> OverBudget {
        self.over.fetch_add(1, Relaxed);
        telemetry::d2p_over_budget(true);
        OverBudget(self.clone())
    }

    /// A session that lost residency came back; `tokens`: how stale its best backup is.
    pub fn found(&self, tokens: Tokens) {
        let bucket = tokens.div_ceil(24).checked_ilog2().map_or(0, |k| k as usize + 1);
        let bucket = bucket + usize::from(tokens > bound(bucket));
        self.stale[bucket.min(BUCKETS - 1)].fetch_add(1, Relaxed);
    }

    /// A session that had been pushed came back; `in_time`: the push was complete.
    pub fn pushed(&self, in_time: bool) {
        self.issued.fetch_add(1, Relaxed);
        self.in_time.fetch_add(u64::from(in_time), Relaxed);
    }

    /// Every backup of a session that lost residency is over β: sync falls behind.
    pub fn behind(&self) {
        self.beta_violations.fetch_add(1, Relaxed);
        telemetry::d2p_behind();
    }

    /// A turn is served as Reseed.
    pub fn reseed(&self, rung: Rung) {
        self.reseeds.fetch_add(1, Relaxed);
        let hit = matches!(rung, Rung::Restore | Rung::Backup);
        self.backup_hits.fetch_add(u64::from(hit), Relaxed);
        self.delta.fetch_add(u64::from(rung == Rung::Delta), Relaxed);
    }

    /// A reseed from a backup is done: checks Theorem 4 on it. `transfer_ms`, `prefill_ms`: as measured at the D.
    pub fn reseeded(&self, reseed: &Reseed, transfer_ms: f64, prefill_ms: f64, model: &CostModel) {
        let (t_p2d, t_prefill) = (reseed.transfer_bound(model), reseed.prefill_bound(model));
        telemetry::d2p_reseed(transfer_ms, prefill_ms, t_p2d + t_prefill);
        if reseed.computed <= reseed.beta && !reseed.holds(model) {
            self.theorem4_violations.fetch_add(1, Relaxed);
            telemetry::d2p_theorem4();
            let cost = reseed.cost(model);
            tracing::error!(
                ?reseed,
                cost,
                t_p2d,
                t_prefill,
                transfer_ms,
                prefill_ms,
                "Theorem 4 is violated"
            );
        }
    }

    /// The figures so far.
    pub fn figures(&self) -> SyncFigures {
        let at = |count: &AtomicU64| count.load(Relaxed);
        let issued = at(&self.issued);
        SyncFigures {
            synced_before_next_turn_pct: match issued {
                0 => 100.0,
                n => (10_000.0 * at(&self.in_time) as f64 / n as f64).round() / 100.0,
            },
            staleness_p50: self.percentile(50),
            staleness_p99: self.percentile(99),
            beta_violations: at(&self.beta_violations),
            theorem4_violations: at(&self.theorem4_violations),
            reseeds: at(&self.reseeds),
            backup_hits: at(&self.backup_hits),
            delta: at(&self.delta),
            over_budget: at(&self.over),
        }
    }

    fn percentile(&self, percent: u64) -> Tokens {
        let counts = self.stale.each_ref().map(|count| count.load(Relaxed));
        let rank = (counts.iter().sum::<u64>() * percent).div_ceil(100);
        let mut seen = 0;
        let bucket = counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(0, bound)
    }
}

/// Upper end of a bucket in tokens.
fn bound(bucket: usize) -> Tokens {
    bucket.checked_sub(1).map_or(0, |k| 24 << k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_they_say() {
        for (tokens, upper) in [(0, 0), (1, 24), (24, 24), (25, 48), (48, 48), (49, 96), (4096, 6144)] {
            let meter = SyncMeter::default();
            meter.found(tokens);
            assert_eq!(
                (meter.figures().staleness_p50, meter.figures().staleness_p99),
                (upper, upper),
                "{tokens}"
            );
        }
    }

    #[test]
    fn counts_and_guards() {
        let meter = Arc::new(SyncMeter::default());
        assert_eq!(meter.figures().synced_before_next_turn_pct, 100.0);
        [true, true, false].into_iter().for_each(|in_time| meter.pushed(in_time));
        meter.behind();
        [Rung::Restore, Rung::Backup, Rung::Delta, Rung::Local]
            .into_iter()
            .for_each(|rung| meter.reseed(rung));
        let model = CostModel::reference();
        meter.reseeded(&Reseed { length: 100, transferred: 100, computed: 0, beta: 24 }, 1.0, 1.0, &model);
        let over = meter.over_budget();
        let figures = meter.figures();
        assert_eq!((figures.reseeds, figures.backup_hits, figures.delta), (4, 2, 1));
        assert_eq!((figures.beta_violations, figures.theorem4_violations, figures.over_budget), (1, 0, 1));
        assert_eq!(figures.synced_before_next_turn_pct, 66.67);
        drop(over);
        assert_eq!(meter.figures().over_budget, 0);
    }
}
