#![no_main]
//! See `checks.rs`.

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use libfuzzer_sys::fuzz_target;

// The first bytes choose the API, a header and its value.
fuzz_target!(|data: &[u8]| {
    let Some(([pick, length], rest)) = data.split_first_chunk::<2>() else { return };
    let (value, body) = rest.split_at(usize::from(*length).min(rest.len()));
    checks::identity(*pick, value, body);
});
