//! Surroundings that go wrong: no C compiler, a damaged kernel cache, several processes at once. Each is tried
//! in a process of its own (this test binary, started again); results are right and the exit status is 0.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kiln::Result;
use kiln::prelude::*;

const JOB: &str = "KILN_TEST_JOB";

/// A folder that is gone when the test is over.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kiln-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }

    fn objects(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(&self.0).map(|all| all.flatten().map(|f| f.path()).collect::<Vec<_>>());
        files.unwrap_or_default().into_iter().filter(|p| p.extension().is_some_and(|e| e == "so")).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// This binary again, running `child` only.
fn child_process(cache: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "child", "--nocapture"]);
    command.env(JOB, "run").env("KILN_CACHE_DIR", cache).env_remove("KILN_LOGS").env_remove("KILN_CC");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Eager and compiled agree: a pointwise chain, and a training step, three times each.
fn work() -> Result<()> {
    let dev = Device::Cpu;
    let x = Tensor::randn([17, 9], &dev)?;
    let chain = || ((&x * 2.0 + 1.0).tanh() * &x).softmax(-1).ok();
    let close = |a: &Tensor, b: &Tensor| -> Result<bool> {
        Ok(a.to_vec::<f32>()?
            .iter()
            .zip(b.to_vec::<f32>()?)
            .all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0)))
    };
    let compiled = kiln::compile(chain);
    for _ in 0..3 {
        assert!(close(&compiled()?, &chain()?)?);
    }
    let train = |compile: bool| -> Result<Vec<Tensor>> {
        manual_seed(1);
        let model = nn::Linear::new(9, 4)?;
        let optimizer = optim::AdamW::new(model.parameters(), 0.1)?;
        let (x, y) = (Tensor::randn([6, 9], &dev)?, Tensor::from_slice(&[0i64, 1, 2, 3, 0, 1])?);
        let region = Compile::new().disable(!compile).region();
        for _ in 0..3 {
            region.run(|| {
                optimizer.zero_grad();
                model.forward(&x)?.cross_entropy(&y)?.backward()?;
                optimizer.step()
            })?;
        }
        Ok(model.parameters())
    };
    for (a, b) in train(true)?.iter().zip(train(false)?) {
        assert!(close(a, &b)?);
    }
    Ok(())
}

/// What the children do; nothing when the tests themselves run.
#[test]
#[ignore = "started by other tests, in a process of its own"]
fn child() -> Result<()> {
    match std::env::var_os(JOB) {
        Some(job) if job == "two kernels" => two_kernels(),
        Some(job) if job == "unloaded" => dropped_functions(),
        Some(job) if job == "optimizer" => optimizer_without_square_roots(),
        Some(_) => work(),
        None => Ok(()),
    }
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}\n{text}{}", output.status, String::from_utf8_lossy(&output.stdout));
    text
}

#[test]
fn without_a_compiler_there_is_one_warning() {
    let folder = Folder::new("no-compiler");
    let output = child_process(&folder.0).env("KILN_CC", "none").output().unwrap();
    let text = succeeded(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].contains("warning") && lines[0].contains("compiler"), "{text}");
    assert!(folder.objects().is_empty());
}

#[test]
fn a_compiler_that_fails_is_like_none() {
    let folder = Folder::new("bad-compiler");
    let output = child_process(&folder.0).env("KILN_CC", "false").output().unwrap();
    let text = succeeded(&output);
    assert_eq!(text.lines().filter(|line| line.contains("warning")).count(), 1, "{text}");
}

/// A compiler that does this before it does its work.
fn fake_compiler(folder: &Folder, before: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(&folder.0).unwrap();
    let path = folder.0.join("cc");
    std::fs::write(&path, format!("#!/bin/sh\n{before}\nexec cc \"$@\"\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    path.to_string_lossy().into_owned()
}

/// Lines of the C text that the compiler is given decide; the source is the one argument that ends in `.c`.
const SOURCE: &str = "for word; do case $word in *.c) source=$word;; esac; done";

#[test]
fn a_compiler_that_crashes_on_one_kernel_leaves_the_others_compiled() {
    let (cache, folder) = (Folder::new("crash-cache"), Folder::new("crash"));
    // The chain has a tanh, the training step has none.
    let crash = format!("{SOURCE}\nif grep -q tanh $source; then kill -SEGV $$; fi");
    let compiler = fake_compiler(&folder, &crash);
    let text = succeeded(&child_process(&cache.0).env("KILN_CC", compiler).output().unwrap());
    assert_eq!(text.lines().filter(|line| line.contains("warning")).count(), 1, "{text}");
    assert!(text.contains("running eagerly") && text.contains("SIGSEGV"), "{text}");
    assert!(!cache.objects().is_empty());
}

#[test]
fn a_compiler_that_hangs_is_given_up() {
    let (cache, folder) = (Folder::new("hang-cache"), Folder::new("hang"));
    let compiler = fake_compiler(&folder, &format!("{SOURCE}\nif grep -q tanh $source; then sleep 600; fi"));
    let start = std::time::Instant::now();
    let mut command = child_process(&cache.0);
    let output = command.env("KILN_CC", compiler).env("KILN_CC_TIMEOUT", "4").output().unwrap();
    let text = succeeded(&output);
    assert_eq!(text.lines().filter(|line| line.contains("warning")).count(), 1, "{text}");
    assert!(text.contains("ran longer than 4s"), "{text}");
    assert!(start.elapsed().as_secs() < 100, "asked once, not for every call");
}

#[test]
fn damaged_kernels_are_compiled_again() {
    let folder = Folder::new("damaged");
    assert_eq!(succeeded(&child_process(&folder.0).output().unwrap()), "");
    let objects = folder.objects();
    assert!(!objects.is_empty());
    for (i, path) in objects.iter().enumerate() {
        // Cut short, emptied, or something else altogether.
        let whole = std::fs::read(path).unwrap();
        let damaged = match i % 3 {
            0 => whole[..whole.len() / 2].to_vec(),
            1 => Vec::new(),
            _ => b"not an object".to_vec(),
        };
        let _ = std::fs::remove_file(path);
        std::fs::write(path, damaged).unwrap();
    }
    succeeded(&child_process(&folder.0).output().unwrap());
    assert_eq!(folder.objects().len(), objects.len());
    // And now from the disk: nothing is compiled a third time.
    let written = |path: &PathBuf| std::fs::metadata(path).unwrap().modified().unwrap();
    let before: Vec<_> = objects.iter().map(written).collect();
    assert_eq!(succeeded(&child_process(&folder.0).output().unwrap()), "");
    assert_eq!(objects.iter().map(written).collect::<Vec<_>>(), before);
}

#[test]
fn several_processes_at_once() {
    let folder = Folder::new("at-once");
    let children: Vec<_> = (0..3).map(|_| child_process(&folder.0).spawn().unwrap()).collect();
    for child in children {
        assert_eq!(succeeded(&child.wait_with_output().unwrap()), "");
    }
    // No half-written leftovers: objects and their notes only.
    let files: Vec<_> = std::fs::read_dir(&folder.0).unwrap().flatten().map(|f| f.file_name()).collect();
    assert!(files.iter().all(|name| !name.to_string_lossy().contains("tmp")), "{files:?}");
    assert!(!folder.objects().is_empty());
}

#[cfg(unix)]
#[test]
fn a_cache_that_others_can_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("open");
    std::fs::create_dir_all(&folder.0).unwrap();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o777)).unwrap();
    succeeded(&child_process(&folder.0).output().unwrap());
    assert!(
        folder.objects().is_empty(),
        "nothing is loaded from, or put into, a folder that others can write to"
    );
}

/// A kernel with a tanh, one without, and a product between them, so that they are two.
fn two_kernels() -> Result<()> {
    let dev = Device::Cpu;
    manual_seed(4);
    let (x, w) = (Tensor::randn([40, 30], &dev)?, Tensor::randn([30, 30], &dev)?);
    let halves = x.slice(1, 0, 30, 2)?;
    // Reductions, broadcasts, windows, lists and write-backs are in the part that is not compiled.
    let count = Tensor::zeros([30], &dev)?;
    let body = || -> Result<Tensor> {
        let bent = (&x * 0.5 + 0.25).tanh().ok()?;
        let sums = bent.sum_dim(0, false)?.tanh()?;
        count.add_(&sums)?;
        let both = Tensor::cat(&[bent.mm(&w)?, (&halves * &halves).tanh().ok()?], 1)?;
        (both.exp()? - 1.0).ok()?.softmax(-1)
    };
    let want = body()?.to_vec::<f32>()?;
    let counted = count.to_vec::<f32>()?;
    count.fill_(0.0)?;
    let region = Compile::new().region();
    for round in 1..4 {
        let got = region.run(body)?.to_vec::<f32>()?;
        assert!(want.iter().zip(&got).all(|(a, b)| (a - b).abs() <= 1e-5), "{want:?} {got:?}");
        let now = count.to_vec::<f32>()?;
        assert!(counted.iter().zip(&now).all(|(a, b)| (a * round as f32 - b).abs() <= 1e-4));
    }
    let explanation = region.explain();
    let graph = &explanation.graphs[0];
    assert!(graph.interpreted.is_none(), "only the kernels that failed run eagerly: {explanation}");
    let text = explanation.to_string();
    assert!(graph.kernels > 0 && graph.fallbacks.iter().any(|op| op.contains("tanh")), "{text}");
    assert!(text.contains("runs eagerly inside") && text.contains("C compiler failed"), "{text}");
    Ok(())
}

/// A list kernel that fails: the parameters are changed one by one.
fn optimizer_without_square_roots() -> Result<()> {
    let dev = Device::Cpu;
    let train = |compile: bool| -> Result<(Vec<Tensor>, String)> {
        manual_seed(1);
        let model = nn::seq![nn::Linear::new(9, 5)?, nn::ReLU, nn::Linear::new(5, 4)?];
        let optimizer = optim::AdamW::new(model.parameters(), 0.1)?;
        let (x, y) = (Tensor::randn([6, 9], &dev)?, Tensor::from_slice(&[0i64, 1, 2, 3, 0, 1])?);
        let region = Compile::new().disable(!compile).region();
        for _ in 0..3 {
            region.run(|| {
                optimizer.zero_grad();
                model.forward(&x)?.cross_entropy(&y)?.backward()?;
                optimizer.step()
            })?;
        }
        Ok((model.parameters(), region.explain().to_string()))
    };
    let ((compiled, text), (eager, _)) = (train(true)?, train(false)?);
    for (a, b) in compiled.iter().zip(&eager) {
        let (a, b) = (a.to_vec::<f32>()?, b.to_vec::<f32>()?);
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-4), "{a:?} {b:?}");
    }
    assert!(text.contains("runs eagerly inside") && !text.contains("runs op by op"), "{text}");
    Ok(())
}

#[test]
fn a_kernel_that_fails_runs_eagerly_and_the_rest_of_its_graph_is_compiled() {
    for (job, marker) in [("two kernels", "tanh"), ("optimizer", "root")] {
        let (cache, folder) = (Folder::new("group-cache"), Folder::new("group"));
        let crash =
            format!("{SOURCE}\nif grep -q 'kiln_{marker}_f32(v[0-9]' $source; then kill -SEGV $$; fi");
        let compiler = fake_compiler(&folder, &crash);
        let output = child_process(&cache.0).env(JOB, job).env("KILN_CC", compiler).output().unwrap();
        let text = succeeded(&output);
        assert_eq!(text.lines().filter(|line| line.contains("warning")).count(), 1, "{job}: {text}");
        assert!(text.contains("running eagerly") && text.contains("SIGSEGV"), "{job}: {text}");
        assert!(!cache.objects().is_empty(), "{job}");
    }
}

/// Kernels of functions that are gone are unloaded: their mappings would add up to more than a process may have.
#[cfg(target_os = "linux")]
#[test]
fn kernels_of_dropped_functions_are_unloaded() {
    let folder = Folder::new("unloaded");
    let output = child_process(&folder.0).env(JOB, "unloaded").output().unwrap();
    assert_eq!(succeeded(&output), "");
}

/// As text, the mappings of kernels.
fn mapped_kernels() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let is_kernel = |line: &&str| line.contains("unloaded") && line.contains("r-xp") && line.contains(".so");
    maps.lines().filter(is_kernel).map(str::to_owned).collect()
}

fn dropped_functions() -> Result<()> {
    let x = Tensor::ones([64], &Device::Cpu)?;
    let kept = Compile::new().region();
    let body = || (&x * 2.0).exp().ok();
    let want = kept.run(body)?.to_vec::<f32>()?;
    for number in 0..4 {
        let region = Compile::new().region();
        // Each of these is another text.
        let result = region.run(|| match number {
            0 => x.tanh()?.neg(),
            1 => x.sigmoid()?.neg(),
            2 => x.sqrt()?.neg(),
            _ => x.erf()?.neg(),
        })?;
        drop(result.to_vec::<f32>()?);
    }
    assert!(mapped_kernels().len() > 1, "{:?}", mapped_kernels());
    kiln_runtime::KernelCache::global().release();
    assert_eq!(mapped_kernels().len(), 1, "only that of the function that is left: {:?}", mapped_kernels());
    assert_eq!(kept.run(body)?.to_vec::<f32>()?, want);
    drop(kept);
    assert!(mapped_kernels().is_empty(), "{:?}", mapped_kernels());
    Ok(())
}
