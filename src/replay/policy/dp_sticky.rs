//! `dp-sticky`: a session stays on the worker of its first turn, which is the one with fewest requests then.
//! Source: session affinity of SGLang's gateway (`manual`, sticky map) and of Dynamo (`session affinity`).

use std::collections::HashMap;

use super::baseline::{Choose, Route, View};
use crate::core::types::SessionId;

/// See the module.
#[derive(Debug, Default)]
pub struct DpSticky {
    pins: HashMap<SessionId, usize>,
}

impl Choose for DpSticky {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let pinned = |pins: &HashMap<SessionId, usize>, w: usize| pins.values().filter(|p| **p == w).count();
        if let Some(worker) = self.pins.get(view.session) {
            return Route::Local(*worker);
        }
        let least =
            (0..view.workers.len()).min_by_key(|&w| (view.workers[w].requests, pinned(&self.pins, w)));
        let worker = least.unwrap_or(0);
        self.pins.insert(view.session.clone(), worker);
        Route::Local(worker)
    }
}
