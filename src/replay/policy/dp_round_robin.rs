//! `dp-round-robin`: fused workers in turn, whoever holds what. Source: the default of every load balancer, e.g.
//! `--policy round_robin` of SGLang's gateway.

use super::baseline::{Choose, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct DpRoundRobin {
    turns: usize,
}

impl Choose for DpRoundRobin {
    fn choose(&mut self, view: &View<'_>) -> Route {
        self.turns += 1;
        Route::Local((self.turns - 1) % view.workers.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    #[test]
    fn goes_round() {
        let mut policy = DpRoundRobin::default();
        let case = Case::new("s", 1000, &[worker(0, 990, 0), worker(0, 0, 0)], &[]);
        let routes: Vec<Route> = (0..3).map(|_| policy.choose(&case.view())).collect();
        assert_eq!(routes, [Route::Local(0), Route::Local(1), Route::Local(0)]);
    }
}
