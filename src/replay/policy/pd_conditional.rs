//! `pd-conditional`: the D with the smallest KV cost; the P is bypassed iff the uncached part is below 2048 tokens
//! and below 0.7 of the prompt. Source: NVIDIA Dynamo, KV router and conditional disaggregation.

use super::baseline::{Choose, Route, View};
use super::dp_kv_cost::cheapest;

/// Longest uncached part computed on the D.
const MAX_LOCAL: u64 = 2048;
/// And its largest share of the prompt.
const MAX_SHARE: f64 = 0.7;

/// See the module.
#[derive(Debug, Default)]
pub struct PdConditional;

impl Choose for PdConditional {
    fn choose(&mut self, view: &View<'_>) -> Route {
        let d = cheapest(view);
        let uncached = view.uncached(d);
        let small = uncached < MAX_LOCAL && (uncached as f64) < MAX_SHARE * view.input as f64;
        match view.idlest_prefill() {
            Some(p) if !small => Route::Through(p, d),
            _ => Route::Local(d),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::policy::baseline::testing::{Case, worker};

    #[test]
    fn bypasses_p_only_below_both_limits() {
        let case = |input, hit| Case::new("s", input, &[worker(0, hit, 0)], &[9, 5]);
        let choose = |input, hit| PdConditional.choose(&case(input, hit).view());
        assert_eq!(choose(50_000, 50_000 - 2047), Route::Local(0));
        assert_eq!(choose(50_000, 50_000 - 2048), Route::Through(1, 0));
        assert_eq!(choose(1000, 0), Route::Through(1, 0));
        assert_eq!(choose(1000, 400), Route::Local(0));
    }
}
