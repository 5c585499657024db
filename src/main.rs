//! The `kvc-router` command.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // clap answers bad flags itself, with exit code 2.
    kvc_router::cli::run(kvc_router::cli::Cli::parse()).into()
}
