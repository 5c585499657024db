//! `dp-kv-cost`: the smallest `prefill blocks − overlap credit + decode blocks`. Source: the KV router of NVIDIA
//! Dynamo with its default overlap weight of 1.

use super::baseline::{Choose, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct DpKvCost;

/// The worker with the smallest cost, in tokens (blocks are a constant factor).
pub fn cheapest(view: &View<'_>) -> usize {
    let cost = |w: &usize| {
        let worker = &view.workers[*w];
        (worker.pending + view.uncached(*w) + worker.active, *w)
    };
    (0..view.workers.len()).min_by_key(cost).unwrap_or(0)
}

impl Choose for DpKvCost {
    fn choose(&mut self, view: &View<'_>) -> Route {
        Route::Local(cheapest(view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    /// Decoding neighbours count as much as prefill: it leaves a session's worker for an idle one.
    #[test]
    fn counts_decode_blocks_like_prefill_blocks() {
        let mut busy = worker(3, 50_000, 0);
        busy.active = 60_000;
        let choose = |workers: &[_]| DpKvCost.choose(&Case::new("s", 51_000, workers, &[]).view());
        assert_eq!(choose(&[busy, worker(0, 0, 0)]), Route::Local(1));
        busy.active = 40_000;
        assert_eq!(choose(&[busy, worker(0, 0, 0)]), Route::Local(0));
    }
}
