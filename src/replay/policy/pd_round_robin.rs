//! `pd-round-robin`: vanilla disaggregation. Every turn goes through the next P to the next D, whoever holds
//! what. Source: the default of SGLang's and vLLM's P/D routers (`--pd-disaggregation --policy round_robin`).

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
