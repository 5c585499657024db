//! `dp-cache-aware`: when loads are imbalanced (max − min > 64 and max > 1.5·min requests) the shortest queue; else
//! the longest prefix match when it covers enough of the prompt, else the smallest load. Source: `cache_aware` of
//! SGLang's gateway / SMG (`--balance-abs-threshold 64 --balance-rel-threshold 1.5 --cache-threshold 0.3`).
//! The original sends a miss to the worker with the smallest tree; load decides here, its better variant.

use super::baseline::{Choose, Route, View};

const ABSOLUTE: u32 = 64;
const RELATIVE: f64 = 1.5;
const MATCH: f64 = 0.3;

/// See the module.
#[derive(Debug, Default)]
pub struct DpCacheAware;

impl Choose for DpCacheAware {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let load = |w: &usize| (view.workers[*w].requests, view.workers[*w].cached, *w);
        let all = 0..view.workers.len();
        let shortest = all.clone().min_by_key(load).unwrap_or(0);
        let most = view.workers.iter().map(|w| w.requests).max().unwrap_or(0);
        let least = view.workers[shortest].requests;
        if most - least > ABSOLUTE && f64::from(most) > RELATIVE * f64::from(least) {
            return Route::Local(shortest);
        }
        let best = all.max_by_key(|w| (view.workers[*w].hit, std::cmp::Reverse(load(w)))).unwrap_or(0);
        let matched = view.workers[best].hit as f64 > MATCH * view.input as f64;
        Route::Local(if matched { best } else { shortest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    fn choose(workers: &[crate::replay::policy::baseline::WorkerView]) -> Route {
        DpCacheAware.choose(&Case::new("s", 1000, workers, &[]).view())
    }

    #[test]
    fn follows_the_prefix_until_the_gate_closes() {
        assert_eq!(choose(&[worker(5, 0, 0), worker(40, 400, 0)]), Route::Local(1));
        assert_eq!(choose(&[worker(5, 0, 0), worker(40, 300, 0)]), Route::Local(0));
        assert_eq!(choose(&[worker(5, 0, 0), worker(70, 990, 0)]), Route::Local(0));
        assert_eq!(choose(&[worker(200, 0, 0), worker(280, 990, 0)]), Route::Local(1));
    }
}
