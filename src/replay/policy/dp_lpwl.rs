//! `dp-lpwl`: least prefill work left. The worker with the smallest `pending prefill tokens + input − hit`; ties by
//! requests. Source: the `leastwork` policy of agentic-kvc (a parameter-free successor of LMetric).

use super::baseline::{Choose, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct DpLpwl;

impl Choose for DpLpwl {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let work = |w: &usize| (view.workers[*w].pending + view.uncached(*w), view.workers[*w].requests, *w);
        Route::Local((0..view.workers.len()).min_by_key(work).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    /// A queue longer than what the cache saves makes it leave; many decodes do not.
    #[test]
    fn weighs_the_queue_against_the_cache_in_tokens() {
        let choose = |workers: &[_]| DpLpwl.choose(&Case::new("s", 50_000, workers, &[]).view());
        assert_eq!(choose(&[worker(90, 49_000, 48_000), worker(0, 0, 0)]), Route::Local(0));
        assert_eq!(choose(&[worker(1, 49_000, 50_000), worker(0, 0, 0)]), Route::Local(1));
    }
}
