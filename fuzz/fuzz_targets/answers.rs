#![no_main]
//! See `checks.rs`.

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use libfuzzer_sys::fuzz_target;

// The first bytes choose the API and where the answer is cut.
fuzz_target!(|data: &[u8]| {
    let Some(([pick, cuts], rest)) = data.split_first_chunk::<2>() else { return };
    checks::answers(*pick, u64::from(*cuts), rest);
});
