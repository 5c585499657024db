//! `round_robin_next` (Algorithm 3 lines 15, 26, 27) and its production counterpart, least backlog.

use serde::{Deserialize, Serialize};

use super::options::{Options, Placement};
use super::route::PrefillView;
use super::types::WorkerId;

/// The two round-robin counters of Σ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RoundRobin {
    /// Turns given to P workers so far.
    pub prefill: usize,
    /// Blind Fallbacks given to D workers so far.
    pub decode: usize,
}

impl RoundRobin {
    /// Line 15: the P for a turn. `paper`: round robin; `production`: least backlog, lowest id.
    pub fn pick_prefill(&mut self, prefills: &[PrefillView], options: &Options) -> Option<WorkerId> {
        match options.placement {
            Placement::Spec => {
                let p = prefills.get(self.prefill % prefills.len().max(1))?;
                self.prefill += 1;
                Some(p.id)
            }
            Placement::Cost => prefills.iter().min_by_key(|p| (p.backlog, p.id)).map(|p| p.id),
        }
    }

    /// Lines 26-27, both blind.
    pub fn pick_fallback(
        &mut self,
        prefills: &[PrefillView],
        decodes: &[WorkerId],
        options: &Options,
    ) -> Option<(Option<WorkerId>, WorkerId)> {
        let d = *decodes.get(self.decode % decodes.len().max(1))?;
        self.decode += 1;
        Some((self.pick_prefill(prefills, options), d))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_goes_round_and_least_backlog_goes_by_backlog() {
        let view = |id, backlog| PrefillView { id: WorkerId(id), backlog, held: 0 };
        let p = [view(0, 9), view(1, 5), view(2, 5)];
        let mut rr = RoundRobin::default();
        let paper = Options::paper();
        let picks: Vec<_> = (0..4).filter_map(|_| rr.pick_prefill(&p, &paper)).map(|w| w.0).collect();
        assert_eq!(picks, [0, 1, 2, 0]);
        assert_eq!(rr.pick_prefill(&p, &Options::production()), Some(WorkerId(1)));
        assert_eq!(rr.pick_prefill(&[], &paper), None);
        let d = [WorkerId(4), WorkerId(6)];
        assert_eq!(rr.pick_fallback(&[], &d, &paper), Some((None, WorkerId(4))));
        assert_eq!(rr.pick_fallback(&p, &d, &paper), Some((Some(WorkerId(1)), WorkerId(6))));
        assert_eq!(rr.pick_fallback(&p, &[], &paper), None);
    }
}
