#![no_main]
//! See `checks.rs`.

#[path = "../checks.rs"]
#[allow(dead_code)]
mod checks;

use libfuzzer_sys::fuzz_target;

thread_local! {
    static DIR: tempfile::TempDir = tempfile::tempdir().expect("a temporary directory");
}

fuzz_target!(|data: &[u8]| DIR.with(|dir| checks::settings(&dir.path().join("settings.toml"), data)));
