//! `ppd`: a conversation is bound to one D, which computes an append itself while it is below a threshold; longer
//! ones go through P. Source: PPD disaggregation, arXiv:2603.13358 (its weights folded into our `τ_append`, so
//! that both sides of the comparison draw the line at the same length).

use super::baseline::{Choose, Pins, Route, View};

/// Longest append computed on the D.
const THRESHOLD: u64 = 8192;

/// See the module.
#[derive(Debug, Default)]
pub struct Ppd {
    pins: Pins,
}

impl Choose for Ppd {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let (d, first) = self.pins.of(view);
        match view.idlest_prefill() {
            Some(p) if first || view.uncached(d) > THRESHOLD => Route::Through(p, d),
            _ => Route::Local(d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    #[test]
    fn appends_locally_up_to_the_threshold() {
        let mut policy = Ppd::default();
        let case = |hit| Case::new("s", 50_000, &[worker(0, hit, 0), worker(0, 0, 0)], &[0]);
        assert_eq!(policy.choose(&case(0).view()), Route::Through(0, 0));
        assert_eq!(policy.choose(&case(50_000 - 8192).view()), Route::Local(0));
        assert_eq!(policy.choose(&case(50_000 - 8193).view()), Route::Through(0, 0));
    }
}
