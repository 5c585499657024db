//! `kvc-router explain` and `kvc-router identify`: recorded decisions and requests.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use flate2::read::MultiGzDecoder;

use super::{Exit, bad_input};

/// Largest input read, in bytes, unpacked: a mistake should not fill the memory.
const MAX_INPUT: u64 = 1 << 30;

/// Why did this turn go there? Replays recorded decisions; exit code 1 on a difference.
#[derive(Debug, Args)]
pub struct Explain {
    /// JSON list of cases, also gzipped; `-` = standard input.
    #[arg(value_name = "FILE[.gz]")]
    file: PathBuf,
}

/// Whose turn is this, and why? Places recorded requests; exit code 1 on a difference or a 400.
#[derive(Debug, Args)]
pub struct Identify {
    /// JSON list of requests or cases, also gzipped; `-` = standard input.
    #[arg(value_name = "FILE[.gz]")]
    file: PathBuf,
}

impl Explain {
    pub(super) fn run(self) -> Exit {
        answer(&self.file, crate::explain::run)
    }
}

impl Identify {
    pub(super) fn run(self) -> Exit {
        answer(&self.file, crate::sessions::identify::run)
    }
}

fn answer(file: &Path, run: impl FnOnce(&str) -> Result<(String, bool), String>) -> Exit {
    match read(file).and_then(|text| run(&text)) {
        Ok((text, met)) => {
            // A reader that left early (`| head`) is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            if met { Exit::Ok } else { Exit::Failure }
        }
        Err(problem) => bad_input(format!("{}: {problem}", file.display())),
    }
}

/// A file's text, unpacked when its bytes are gzip's.
fn read(file: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let result = if file == Path::new("-") {
        std::io::stdin().take(MAX_INPUT).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(file).and_then(|f| f.take(MAX_INPUT).read_to_end(&mut bytes))
    };
    result.map_err(|e| e.to_string())?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let mut unpacked = Vec::new();
        let gz = MultiGzDecoder::new(&bytes[..]);
        gz.take(MAX_INPUT).read_to_end(&mut unpacked).map_err(|e| format!("damaged gzip: {e}"))?;
        bytes = unpacked;
    }
    String::from_utf8(bytes).map_err(|_| "not UTF-8 text".into())
}
