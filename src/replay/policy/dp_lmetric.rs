//! `dp-lmetric`: the smallest product of new prefill tokens and batch size. Source: LMetric, arXiv:2603.15202.

use super::baseline::{Choose, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct DpLmetric;

impl Choose for DpLmetric {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let product = |w: &usize| {
            let batch = u64::from(view.workers[*w].requests);
            // Idle workers tie at 0: the cache decides among them.
            (view.uncached(*w) * batch, view.uncached(*w), *w)
        };
        Route::Local((0..view.workers.len()).min_by_key(product).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    #[test]
    fn multiplies() {
        let choose = |workers: &[_]| DpLmetric.choose(&Case::new("s", 10_000, workers, &[]).view());
        assert_eq!(choose(&[worker(9, 9000, 0), worker(1, 0, 0)]), Route::Local(0));
        assert_eq!(choose(&[worker(11, 9000, 0), worker(1, 0, 0)]), Route::Local(1));
        // Its known degeneracy: an idle worker costs nothing, however much it would have to compute.
        assert_eq!(choose(&[worker(1, 9990, 0), worker(0, 0, 0)]), Route::Local(1));
    }
}
