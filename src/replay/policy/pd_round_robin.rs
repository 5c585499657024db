//! `pd-round-robin`: vanilla disaggregation. Every turn goes through the next P to the next D, whoever holds
//! what. Source: `--pd-disaggregation --policy round_robin` of SGLang's router, the proxy of vLLM's examples.

use super::baseline::{Choose, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct PdRoundRobin {
    turns: usize,
}

impl Choose for PdRoundRobin {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let n = self.turns;
        self.turns += 1;
        match view.prefills.len() {
            0 => Route::Local(n % view.workers.len()),
            p => Route::Through(n % p, n % view.workers.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    /// It leaves the D that holds the whole prompt.
    #[test]
    fn goes_round_whoever_holds_the_prompt() {
        let mut policy = PdRoundRobin::default();
        let case = Case::new("s", 1000, &[worker(0, 990, 0), worker(0, 0, 0)], &[0]);
        let routes: Vec<Route> = (0..3).map(|_| policy.choose(&case.view())).collect();
        assert_eq!(routes, [Route::Through(0, 0), Route::Through(0, 1), Route::Through(0, 0)]);
    }
}
