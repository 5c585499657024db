#![no_main]
//! See `checks.rs`.

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use libfuzzer_sys::fuzz_target;

thread_local! {
    static RUNTIME: tokio::runtime::Runtime =
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
}

fuzz_target!(|data: &[u8]| {
    RUNTIME.with(|runtime| checks::transfers(runtime, data));
    checks::admissions(data);
});
