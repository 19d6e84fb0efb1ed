//! The `kiln` command as its users see it: what it prints, and how it exits.

use std::process::Command;

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn kiln(words: &[&str]) -> Ran {
    let output =
        Command::new(env!("CARGO_BIN_EXE_kiln")).args(words).output().expect("the command was built");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn json(line: &str) -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn without_a_cuda_device_one_line_says_so() {
    for words in [
        &["--device", "cuda"][..],
        &["bench", "--device", "cuda"],
        &["explain", "--device", "cuda"],
        &["selftest", "--device", "cuda"],
    ] {
        let ran = kiln(words);
        assert_eq!((ran.code, ran.err.lines().count(), ran.out.as_str()), (Some(1), 1, ""), "{words:?}");
        assert!(ran.err.starts_with("error: no CUDA device"), "{}", ran.err);
    }
}

#[test]
fn usage_errors_are_one_line() {
    for words in [
        &["bench", "nosuch"][..],
        &["--mode", "quick"],
        &["nosuch"],
        &["--layers", "x"],
        &["--device", "tpu"],
    ] {
        let ran = kiln(words);
        assert_eq!((ran.code, ran.err.lines().count(), ran.out.as_str()), (Some(2), 1, ""), "{}", ran.err);
        assert!(ran.err.starts_with("error: "), "{}", ran.err);
    }
    assert!(kiln(&["bench", "nosuch"]).err.contains("adam_10x1024"));
}

#[test]
fn a_missing_peer_file_is_named() {
    let ran = kiln(&["bench", "overhead", "--peer", "no-such-file.jsonl"]);
    assert_eq!((ran.code, ran.err.lines().count()), (Some(1), 1), "{}", ran.err);
    assert!(ran.err.starts_with("error: no-such-file.jsonl"), "{}", ran.err);
}

#[test]
fn help_ops_and_info() {
    assert!(kiln(&["--help"]).out.contains("selftest"));
    assert!(kiln(&["ops"]).out.contains("addcdiv"));
    assert!(kiln(&["info"]).out.contains("kernel cache"));
}

#[test]
fn the_doctor_says_what_is_there_and_what_is_missing() {
    let doctor = |variable: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        let output = command.arg("doctor").env(variable, value).output().expect("the command was built");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    };
    let row = |ran: &Ran, name: &str| {
        let row = ran.out.lines().find(|line| line[3..].trim_start().starts_with(name));
        row.map(str::to_owned).unwrap_or_else(|| panic!("{name} in {}", ran.out))
    };
    let ran = doctor("KILN_NUM_THREADS", "1");
    for name in ["kiln", "CPU", "instructions", "threads", "memory", "C compiler", "kernel cache", "CUDA"] {
        row(&ran, name);
    }
    assert!(row(&ran, "threads").contains("KILN_NUM_THREADS"), "{}", ran.out);

    let ran = doctor("KILN_CC", "none");
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    assert!(row(&ran, "C compiler").starts_with("!!"), "{}", ran.out);
    assert!(ran.err.starts_with("error: needs attention: C compiler"), "{}", ran.err);
    let ran = doctor("KILN_CC", "no-such-compiler");
    assert!(ran.out.contains("apt install gcc"), "{}", ran.out);

    // A file where the directory should be.
    let ran = doctor("KILN_CACHE_DIR", env!("CARGO_BIN_EXE_kiln"));
    assert!(row(&ran, "kernel cache").contains("is not a directory"), "{}", ran.out);
    assert_eq!(ran.code, Some(1));
    let ran = doctor("KILN_ISA", "plain");
    assert!(row(&ran, "instructions").contains("plain"), "{}", ran.out);
}

#[test]
fn the_kernel_cache_is_shown_verified_and_cleared() {
    let folder = std::env::temp_dir().join(format!("kiln-command-cache-{}", std::process::id()));
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        let output =
            command.args(words).env("KILN_CACHE_DIR", &folder).output().expect("the command was built");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let objects = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("objects"));
        line.and_then(|count| count.trim().parse::<usize>().ok()).unwrap_or(usize::MAX)
    };
    assert_eq!(objects(&run(&["cache", "info"]).1), 0);
    // The plain instruction set, so that it is tried here too.
    let (code, _, err) = run(&["explain", "--layers", "1", "--size", "8", "--isa", "plain"]);
    assert_eq!(code, Some(0), "{err}");
    let (_, out, _) = run(&["cache", "info"]);
    let there = objects(&out);
    assert!((1..100).contains(&there), "{out}");
    assert!(run(&["cache", "verify"]).1.contains("whole"));
    let files = std::fs::read_dir(&folder).expect("the cache").flatten().map(|file| file.path());
    let object = files.into_iter().find(|path| path.extension().is_some_and(|ending| ending == "so"));
    std::fs::write(object.expect("an object"), "damaged").expect("written");
    let (code, out, err) = run(&["cache", "verify"]);
    assert_eq!((code, out.as_str(), err.lines().count()), (Some(1), "", 1), "{err}");
    assert!(err.starts_with("error: damaged: "), "{err}");
    assert!(run(&["cache", "clear"]).1.contains("removed"));
    assert_eq!(objects(&run(&["cache", "info"]).1), 0);
    std::fs::remove_dir_all(&folder).expect("the cache's folder");
}

#[test]
fn selftest_passes() {
    let ran = kiln(&["selftest"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.lines().all(|line| line.starts_with("ok ")), "{}", ran.out);
}

/// What ran eagerly because the C compiler failed is not called compiled.
#[test]
fn refused_kernels_fail_the_selftest_and_the_bench() {
    let folder = std::env::temp_dir().join(format!("kiln-command-refused-{}", std::process::id()));
    let run = |words: &[&str], compiler: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(words).env("KILN_CACHE_DIR", &folder).env("KILN_CC", compiler);
        let output = command.output().expect("the command was built");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    };
    for words in [&["selftest"][..], &["bench", "adam_2x32", "--seconds", "0"]] {
        let ran = run(words, "false");
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        assert!(ran.err.contains("failed to compile and ran eagerly"), "{}", ran.err);
        assert!(!ran.out.contains("ok "), "{}", ran.out);
    }
    let ran = run(&["selftest"], "none");
    assert!(ran.out.lines().all(|line| line.starts_with("eager ")), "{}", ran.out);
    std::fs::remove_dir_all(&folder).ok();
}

#[test]
fn explain_shows_the_recipe() {
    let ran = kiln(&["explain", "--layers", "2", "--size", "16"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(!ran.out.trim().is_empty());
}

#[test]
fn the_recipe_begins_with_the_two_runtimes() {
    let ran = kiln(&["recipe", "--layers", "2", "--size", "64", "--seconds", "0"]);
    let mut lines = ran.out.lines();
    for name in ["eager", "compiled"] {
        let line = lines.next().unwrap_or_else(|| panic!("{}", ran.err));
        let number = line.strip_prefix(&format!("{name} runtime: ")).and_then(|rest| rest.strip_suffix("us"));
        assert!(number.is_some_and(|number| number.parse::<f64>().is_ok_and(|us| us > 0.0)), "{line}");
    }
    for fact in ["speed-up", "floor", "bytes moved", "cold", "disk cache", "kernels", "largest difference"] {
        assert!(ran.out.contains(fact), "{fact} in {}", ran.out);
    }
}

#[test]
fn bench_gives_one_object_per_case() {
    let ran = kiln(&["bench", "adam_2x32", "overhead", "--json", "--seconds", "0"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let [adam, overhead] =
        ran.out.lines().map(json).collect::<Vec<_>>().try_into().unwrap_or_else(|_| panic!("{}", ran.out));
    for field in [
        "case",
        "device",
        "mode",
        "eager_us",
        "compiled_us",
        "first_call_s",
        "warm_first_call_s",
        "floor_us",
        "kernels",
        "peak_bytes_eager",
        "peak_bytes_compiled",
        "max_rel_err",
    ] {
        assert!(adam.contains_key(field), "{field}");
    }
    assert_eq!((adam["case"].as_str(), adam["kernels"].as_u64()), (Some("adam_2x32"), Some(1)));
    // An optimizer changes what is there: neither mode needs more than a few small blocks.
    let peak = |key: &str| adam[key].as_u64();
    assert!(peak("peak_bytes_compiled").is_some_and(|bytes| bytes <= 64 << 10), "{adam:?}");
    assert!(overhead["ns_per_op"].as_f64().is_some_and(|ns| ns > 0.0));
    assert!(overhead["allocations_per_call"].is_u64());
}

#[test]
fn a_peer_s_results_stand_beside() {
    let path = std::env::temp_dir().join(format!("kiln-peer-{}.jsonl", std::process::id()));
    let peer = r#"{"case": "adam_2x32", "eager_us": 1e9, "compiled_us": 1e-3, "first_call_s": 1e6, "fused_us": 1e9}"#;
    std::fs::write(&path, peer).unwrap();
    let ran = kiln(&["bench", "adam_2x32", "--seconds", "0", "--peer", &path.to_string_lossy()]);
    std::fs::remove_file(&path).unwrap();
    let row = ran.out.lines().last().unwrap_or_default();
    assert!(row.contains("LOSS") && row.contains("win"), "{}{}", ran.out, ran.err);
}

#[test]
fn a_part_of_the_corpus() {
    let ran = kiln(&["corpus", "loss_scaling_with_check"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
    let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let lines: Vec<&str> = ran.out.lines().collect();
    let row = words(lines[1]);
    assert_eq!((row[0].as_str(), row[1].as_str()), ("loss_scaling_with_check", "yes"), "{}", ran.out);
    assert!(ran.out.contains("item needs the value"), "{}", ran.out);
    assert!(lines[lines.len() - 1].starts_with("1 program: 1 right"), "{}", ran.out);
    assert_eq!(kiln(&["corpus", "nosuch"]).code, Some(1));
}

/// A folder that is gone in the end.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("kiln-command-{name}-{}", std::process::id())))
    }

    /// Everything in it: names, bytes and when they were written.
    fn files(&self) -> Vec<(std::ffi::OsString, Vec<u8>, std::time::SystemTime)> {
        let mut all: Vec<_> = std::fs::read_dir(&self.0)
            .expect("the folder")
            .flatten()
            .map(|file| {
                let bytes = std::fs::read(file.path()).expect("a file");
                let written = file.metadata().and_then(|known| known.modified()).expect("a time");
                (file.file_name(), bytes, written)
            })
            .collect();
        all.sort();
        all
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The numbers of a column of `metrics.csv`.
fn column(csv: &str, name: &str) -> Vec<f64> {
    let head = csv.lines().next().unwrap_or_default();
    let at = head.split(',').position(|other| other == name).unwrap_or_else(|| panic!("{name} in {head}"));
    csv.lines().skip(1).filter_map(|line| line.split(',').nth(at)?.parse().ok()).collect()
}

#[test]
fn a_small_gpt_learns_writes_and_goes_on() {
    let scratch = Scratch::new("gpt");
    let out = scratch.0.to_string_lossy().into_owned();
    let sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "24", "--batch-size", "8"];
    let train = |more: &[&str]| kiln(&[&["train", "gpt", "--out", &out][..], &sizes, more].concat());

    let ran = train(&["--steps", "30", "--lr", "0.01", "--sample", "60", "--prompt", "kernel"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
    assert_eq!(ran.out.lines().filter(|line| line.contains("validation")).count(), 10, "{}", ran.out);
    assert!(ran.out.contains("1 graph, ") && ran.out.contains("0 breaks, 0 recompilations"), "{}", ran.out);
    let (_, sample) = ran.out.split_once("characters/s):\n\n").unwrap_or_else(|| panic!("{}", ran.out));
    assert!(sample.starts_with("kernel") && sample.trim_end_matches('\n').chars().count() > 40, "{sample}");
    let (losses, validation) =
        (column(&scratch.read("metrics.csv"), "loss"), column(&scratch.read("metrics.csv"), "validation"));
    assert_eq!((losses.len(), validation.len()), (30, 10));
    assert!(losses[29] < losses[0] - 0.5 && validation[9] < validation[0] - 0.5, "{losses:?}");
    assert!(scratch.read("loss.svg").contains("cross-entropy"));

    // The same without compiling.
    let eager = Scratch::new("gpt-eager");
    let folder = eager.0.to_string_lossy().into_owned();
    let words =
        ["train", "gpt", "--out", &folder, "--steps", "30", "--lr", "0.01", "--sample", "0", "--no-compile"];
    assert_eq!(kiln(&[&words[..], &sizes].concat()).code, Some(0));
    // Later on rounding grows: at this learning rate a change of 1e-7 in it moves losses as much.
    for (a, b) in losses.iter().zip(column(&eager.read("metrics.csv"), "loss")).take(6) {
        assert!((a - b).abs() < 1e-4, "{a} and {b}");
    }

    // Finished: it says so, and writes nothing but the sample that was asked for.
    let before = scratch.files();
    for more in
        [&["--sample", "0"][..], &["--sample", "0", "--steps", "30"], &["--sample", "5", "--steps", "7"]]
    {
        let ran = train(&[&["--resume"], more].concat());
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
        assert!(ran.out.contains("all 30 steps are done; train longer with --steps N"), "{}", ran.out);
        assert_eq!(ran.out.contains("a sample at"), more[1] == "5", "{}", ran.out);
        assert!(scratch.files() == before, "{more:?}");
    }
    let ran = train(&["--resume", "--steps", "34", "--lr", "0.01", "--sample", "0"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.contains("resuming after step 30 of 34"), "{}", ran.out);
    assert_eq!(column(&scratch.read("metrics.csv"), "step"), (1..=34).map(f64::from).collect::<Vec<_>>());
    assert_eq!(column(&scratch.read("metrics.csv"), "loss")[..30], losses);
    // The learning rate is that of a run of 34 steps, from the first step on.
    let rates = column(&scratch.read("metrics.csv"), "lr");
    for (step, got) in (30..34).zip(&rates[30..]) {
        let part = f64::from(step - 3) / 31.0;
        let want = 0.01 * (0.05 + 0.95 * 0.5 * (1.0 + (std::f64::consts::PI * part).cos()));
        assert!((got - want).abs() < 1e-12, "step {step}: {got} and {want}");
    }

    for (words, told) in [
        (&["--resume", "--steps", "40", "--seed", "1"][..], "seed 1"),
        (&["--steps", "1", "--prompt", "\u{1f525}"], "never occurs in the training text"),
        (&["--steps", "1", "--text", "no-such-file.txt"], "no-such-file.txt"),
    ] {
        let ran = train(words);
        assert_eq!((ran.code, ran.err.lines().count()), (Some(1), 1), "{words:?} {}", ran.err);
        assert!(ran.err.contains(told), "{}", ran.err);
    }
}

#[test]
fn shapes_are_learnt_by_any_backend() {
    let mut accuracies = Vec::new();
    for more in [&["--workers", "0"][..], &["--backend", "aot_eager", "--workers", "3"]] {
        let scratch = Scratch::new("shapes");
        let out = scratch.0.to_string_lossy().into_owned();
        let words =
            ["train", "shapes", "--out", &out, "--epochs", "2", "--pictures", "192", "--batch-size", "32"];
        let ran = kiln(&[&words[..], more].concat());
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
        assert_eq!(ran.out.lines().filter(|line| line.starts_with("epoch")).count(), 2, "{}", ran.out);
        assert!(ran.out.contains("1 graph, "), "{}", ran.out);
        assert_eq!(
            ran.out.matches(": right").count() + ran.out.matches("it is a ").count(),
            3,
            "{}",
            ran.out
        );
        let metrics = scratch.read("metrics.csv");
        let losses = column(&metrics, "loss");
        assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
        accuracies.push(losses);
        assert!(scratch.read("accuracy.svg").contains("held out"));
        // Finished: it says so, shows the pictures once more, and leaves its files alone.
        let before = scratch.files();
        let again = |more: &[&str]| {
            let sizes =
                ["train", "shapes", "--out", &out, "--pictures", "192", "--batch-size", "32", "--resume"];
            kiln(&[&sizes[..], more].concat())
        };
        for more in [&[][..], &["--epochs", "2"], &["--epochs", "1"]] {
            let ran = again(more);
            assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
            assert!(ran.out.contains("all 2 epochs are done; train longer with --epochs N"), "{}", ran.out);
            assert!(scratch.files() == before, "{more:?}");
        }
        // With more epochs it goes on, by the cycle of as many.
        let ran = again(&["--epochs", "3"]);
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{}", ran.out);
        assert!(ran.out.contains("resuming after epoch 2 of 3"), "{}", ran.out);
        let metrics = scratch.read("metrics.csv");
        assert_eq!(column(&metrics, "epoch"), [1.0, 2.0, 3.0]);
        assert_eq!(column(&metrics, "loss")[..2], accuracies[accuracies.len() - 1]);
        let state = kiln::nn::safetensors::load(scratch.0.join("checkpoint.safetensors")).unwrap();
        let number = |name: &str| state.get(name).unwrap().to_vec::<f64>().unwrap()[0];
        assert_eq!(number("part.scheduler.last_epoch"), 18.0);
        let least = 6e-3 / 25.0 / 1e4;
        assert!((number("optimizer.param_groups.0.lr") - least).abs() < 1e-9);
        let ran = again(&["--epochs", "4", "--seed", "1"]);
        assert!(ran.code == Some(1) && ran.err.contains("seed 1"), "{}", ran.err);
    }
    // Other workers and another backend: the same pictures, and the same numbers but for rounding.
    assert!((accuracies[0][1] - accuracies[1][1]).abs() < 0.02, "{accuracies:?}");
}
