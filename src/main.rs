//! CLI.

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replay traces through the core and the policies of the field.
    Replay(kvc_router::replay::cli::ReplayArgs),
}

fn main() {
    match Cli::parse().command {
        Command::Replay(args) => std::process::exit(kvc_router::replay::cli::run(&args)),
    }
}
