//! `pd-once`: a conversation is bound to one D; P computes its first turn, the KV moves once, and D computes every
//! later append, however long. Source: the static append-on-D mode that PPD (arXiv:2603.13358) compares with.

use super::baseline::{Choose, Pins, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct PdOnce {
    pins: Pins,
}

impl Choose for PdOnce {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let (d, first) = self.pins.of(view);
        match view.idlest_prefill() {
            Some(p) if first => Route::Through(p, d),
            _ => Route::Local(d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    /// Even when everything was evicted, the bound D computes it.
    #[test]
    fn moves_the_kv_once() {
        let mut policy = PdOnce::default();
        let first = Case::new("s", 9000, &[worker(3, 0, 0), worker(1, 0, 0)], &[0]);
        assert_eq!(policy.choose(&first.view()), Route::Through(0, 1));
        let evicted = Case::new("s", 90_000, &[worker(0, 0, 0), worker(9, 0, 0)], &[0]);
        assert_eq!(policy.choose(&evicted.view()), Route::Local(1));
    }
}
