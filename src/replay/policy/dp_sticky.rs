//! `dp-sticky`: a session stays on the worker of its first turn, which is the one with fewest requests then.
//! Source: session affinity of SGLang's gateway (`manual`, a sticky map) and of Dynamo.

use super::baseline::{Choose, Pins, Route, View};

/// See the module.
#[derive(Debug, Default)]
pub struct DpSticky {
    pins: Pins,
}

impl Choose for DpSticky {
    fn choose(&mut self, view: &View<'_>) -> Route {
        Route::Local(self.pins.of(view).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    /// Neither a cold cache nor a long queue moves it.
    #[test]
    fn stays_whatever_happens() {
        let mut policy = DpSticky::default();
        let first = Case::new("s", 1000, &[worker(2, 0, 0), worker(1, 0, 0)], &[]);
        assert_eq!(policy.choose(&first.view()), Route::Local(1));
        let later = Case::new("s", 1000, &[worker(0, 990, 0), worker(50, 0, 90_000)], &[]);
        assert_eq!(policy.choose(&later.view()), Route::Local(1));
        // New sessions spread over equally loaded workers.
        let other = Case::new("t", 1000, &[worker(0, 0, 0), worker(0, 0, 0)], &[]);
        assert_eq!(policy.choose(&other.view()), Route::Local(0));
    }
}
