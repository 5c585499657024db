//! What P workers hold of a prompt, and what follows: which backup a D could be given, how stale it is, and where
//! a session's KV is pushed to next.

use std::ops::Range;

use super::gather::Fleet;
use super::shared::Shared;
use super::slot::Role;
use crate::core::cost::Backup;
use crate::core::options::{D2pTarget, Options};
use crate::core::sync::{SyncRule, staleness};
use crate::core::types::{Tokens, WorkerId};
use crate::wire::plan::SyncTarget;

/// Blocks of a prompt that one P could send: its pool and its backup tier together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The P.
    pub p: WorkerId,
    /// Ranges of blocks without a hole, in order.
    pub runs: Vec<Range<u32>>,
}

impl Holding {
    /// Where the run that contains or begins at block `from` ends; `None`: it lacks that block.
    pub fn end_behind(&self, from: u32) -> Option<u32> {
        self.runs.iter().find(|run| run.contains(&from)).map(|run| run.end)
    }

    /// Blocks from the front.
    pub fn front(&self) -> u32 {
        self.end_behind(0).unwrap_or(0)
    }
}

/// The ranges of blocks for which `held` is true.
pub fn runs<T>(chain: &[T], from: usize, mut held: impl FnMut(&T) -> bool) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    if from > 0 {
        runs.push(0..from as u32);
    }
    for (i, block) in chain.iter().enumerate().skip(from) {
        if held(block) {
            let place = i as u32;
            match runs.last_mut().filter(|run| run.end == place) {
                Some(run) => run.end += 1,
                None => runs.push(place..place + 1),
            }
        }
    }
    runs
}

/// Gives each D the backup behind its own prefix from the P that is least stale, if that is within β.
/// `committed`: tokens the session's last turn left.
pub fn offer(fleet: &mut Fleet, committed: Tokens, options: &Options) {
    let Some(rule) = SyncRule::of(options) else { return };
    let block = Tokens::from(options.block_tokens);
    for d in &mut fleet.decode {
        let ends = fleet.holdings.iter().filter_map(|h| Some((h.end_behind(d.overlap)?, h.p)));
        let Some((end, p)) = ends.max_by_key(|(end, p)| (*end, std::cmp::Reverse(*p))) else { continue };
        if rule.within(staleness(committed, Tokens::from(end) * block)) {
            d.backup = Backup { tokens: Tokens::from(end - d.overlap) * block, source: Some(p) };
        }
    }
}

/// How stale the backups of a session are, that its D holds `kept` blocks of: per P, in tokens.
pub fn stale<'a>(
    holdings: &'a [Holding],
    kept: u32,
    committed: Tokens,
    block: Tokens,
) -> impl Iterator<Item = (WorkerId, Tokens)> + 'a {
    holdings.iter().map(move |h| {
        let covered = h.end_behind(kept).unwrap_or(0).max(kept);
        (h.p, staleness(committed, Tokens::from(covered) * block))
    })
}

/// Where a session's KV is pushed to from now on (`d2p_sync_target_policy`). `last`: the P it last had to do with.
pub(super) fn targets(
    shared: &Shared,
    holdings: &[Holding],
    last: Option<WorkerId>,
) -> Vec<(WorkerId, SyncTarget)> {
    if SyncRule::of(&shared.config.options).is_none() {
        return Vec::new();
    }
    let workers = shared.workers();
    let able: Vec<_> = workers
        .iter()
        .filter(|w| w.role == Role::Prefill && w.is_up())
        .filter_map(|w| Some((w.at.id, w.d2p_addr()?)))
        .collect();
    if able.is_empty() {
        return Vec::new();
    }
    let next = || able[shared.next_target() % able.len()].0;
    let chosen = match shared.config.options.d2p_sync_target_policy {
        D2pTarget::Broadcast => None,
        D2pTarget::RoundRobin => Some(next()),
        D2pTarget::LastP => {
            let last = last.filter(|p| able.iter().any(|(id, _)| id == p));
            let most = || holdings.iter().max_by_key(|h| h.runs.iter().map(|r| r.len()).sum::<usize>());
            let holder = || most().filter(|h| !h.runs.is_empty()).map(|h| h.p);
            Some(last.or_else(holder).unwrap_or_else(next))
        }
    };
    let held = |p| holdings.iter().find(|h| h.p == p).map_or(0, Holding::front);
    able.into_iter()
        .filter(|(p, _)| chosen.is_none_or(|chosen| chosen == *p))
        .map(|(p, to)| (p, SyncTarget { to, held: held(p) }))
        .collect()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one run is a list of one run
mod tests {
    use super::*;
    use crate::core::route::Candidate;

    fn candidate(id: u32, overlap: u32) -> Candidate {
        Candidate {
            id: WorkerId(id),
            overlap,
            resident: 0,
            inflight: 0,
            assigned: 0,
            load: None,
            pinned_tokens: 0,
            warm: 1.0,
            backup: Backup::default(),
        }
    }

    #[test]
    fn runs_have_no_holes() {
        let held = [true, true, false, true, true, false];
        assert_eq!(runs(&held, 0, |b| *b), [0..2, 3..5]);
        assert_eq!(runs(&held, 3, |b| *b).first(), Some(&(0..5)));
        assert_eq!(runs(&held[2..3], 0, |b| *b), []);
    }

    #[test]
    fn the_least_stale_p_within_beta_is_offered_behind_each_ds_own_prefix() {
        let holdings = vec![
            Holding { p: WorkerId(7), runs: vec![0..10, 40..100] },
            Holding {
                p: WorkerId(8),
                runs: runs(&[true; 90], 0, |_| true).into_iter().map(|run| 40..run.end).collect(),
            },
        ];
        let mut fleet = Fleet {
            decode: vec![candidate(0, 50), candidate(1, 0), candidate(2, 20)],
            holdings,
            ..Fleet::default()
        };
        let options = Options { d2p_staleness_budget_tokens: Some(240), ..Options::production() };
        offer(&mut fleet, 2410, &options);
        let backups: Vec<_> = fleet.decode.iter().map(|d| (d.backup.tokens, d.backup.source)).collect();
        assert_eq!(backups, [(50 * 24, Some(WorkerId(7))), (0, None), (0, None)]);
        let tight = Options { d2p_staleness_budget_tokens: Some(0), ..options.clone() };
        fleet.decode[0].backup = Backup::default();
        offer(&mut fleet, 2410, &tight);
        assert_eq!(fleet.decode[0].backup.tokens, 50 * 24);
        fleet.decode[0].backup = Backup::default();
        offer(&mut fleet, 2425, &tight);
        assert_eq!(fleet.decode[0].backup.tokens, 0);
        let stale: Vec<_> = stale(&fleet.holdings, 50, 2410, 24).collect();
        assert_eq!(stale, [(WorkerId(7), 10), (WorkerId(8), 250)]);
    }
}
