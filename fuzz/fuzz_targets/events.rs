#![no_main]
//! See `checks.rs`.

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use libfuzzer_sys::fuzz_target;

// The first byte says where the stream is cut.
fuzz_target!(|data: &[u8]| {
    let Some((cuts, rest)) = data.split_first() else { return };
    checks::events(u64::from(*cuts), rest);
});
