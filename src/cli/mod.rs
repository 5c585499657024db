//! The command line. Each command is a small file; what it does lives in its room.

mod args;
mod bench;
mod check_config;
mod demo;
mod key;
mod node;
mod records;
mod serve;
mod signals;

use clap::{Parser, Subcommand};

pub use args::SettingsArgs;
pub use node::node_config;
pub use signals::Signals;

/// A KV-cache-centric router for coding-agent traffic.
#[derive(Debug, Parser)]
#[command(name = "kvc-router", version)]
pub struct Cli {
    /// What to do; without a command: demo.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do.
#[derive(Debug, Subcommand)]
// One value per process: boxing it would only hide the fields from clap.
#[allow(clippy::large_enum_variant)]
pub enum Command {
    /// Gateway in front of running workers.
    Serve(serve::Serve),
    /// One builtin worker.
    Node(node::NodeCommand),
    /// Gateway, workers and real agent sessions in one process.
    Demo(demo::Demo),
    /// Traces through the core and the policies of the field.
    Replay(crate::replay::cli::ReplayArgs),
    /// Why did this turn go there? Replays recorded decisions.
    Explain(records::Explain),
    /// Whose turn is this, and why? Places recorded requests.
    Identify(records::Identify),
    /// Measurements of the parts.
    Bench(bench::Bench),
    /// Make an API key.
    Key(key::Key),
    /// Print the effective settings, or what is wrong with them (exit code 2).
    CheckConfig(check_config::CheckConfig),
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All well.
    Ok = 0,
    /// A difference was found, or the work failed.
    Failure = 1,
    /// The input is wrong: settings, files, flags.
    BadInput = 2,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Runs a command. Errors go to standard error, one line each.
pub fn run(cli: Cli) -> Exit {
    match cli.command.unwrap_or_else(|| Command::Demo(demo::Demo::default())) {
        Command::Serve(command) => command.run(),
        Command::Node(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Replay(args) => match crate::replay::cli::run(&args) {
            0 => Exit::Ok,
            2 => Exit::BadInput,
            _ => Exit::Failure,
        },
        Command::Explain(command) => command.run(),
        Command::Identify(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Key(command) => command.run(),
        Command::CheckConfig(command) => command.run(),
    }
}

/// Says what is wrong with the input.
pub fn bad_input(problem: impl std::fmt::Display) -> Exit {
    eprintln!("error: {problem}");
    Exit::BadInput
}

/// Says why the work failed.
pub fn failure(problem: impl std::fmt::Display) -> Exit {
    eprintln!("error: {problem}");
    Exit::Failure
}
