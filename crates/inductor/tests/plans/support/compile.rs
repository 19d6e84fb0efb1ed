//! Kernels compiled by the C compiler and loaded.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_inductor::{KernelSource, Target};
use kiln_ir::math::c::{FLAGS, Isa};

/// Checks that the C compiler puts into kernels: `KILN_SANITIZE`, as in the runtime.
pub fn sanitizer() -> &'static [&'static str] {
    match std::env::var("KILN_SANITIZE").as_deref() {
        Ok("undefined") => {
            &["-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error"]
        }
        Ok("address") => &[
            "-fsanitize=address,undefined,float-cast-overflow",
            "-fsanitize-undefined-trap-on-error",
            "-fno-omit-frame-pointer",
            "-g",
        ],
        _ => &[],
    }
}

/// The C compiler: `KILN_CC`, as in the runtime.
fn compiler() -> String {
    std::env::var("KILN_CC").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "cc".into())
}

/// A clang, by whatever name, if there is one.
pub fn clang() -> Option<String> {
    let numbered = (14..30).rev().map(|version| format!("clang-{version}"));
    let is_there = |name: &String| Command::new(name).arg("--version").output().is_ok();
    std::iter::once("clang".to_string()).chain(numbered).find(is_there)
}

/// The best instruction set of this machine, or the one that `KILN_ISA` asks for.
pub fn best_isa() -> Isa {
    let asked = std::env::var("KILN_ISA").ok().and_then(|name| Isa::named(&name));
    asked.map_or(Isa::detect(), |asked| asked.max(Isa::detect()))
}

pub type KernelFn = unsafe extern "C" fn(*const *mut u8, *const i64, *const u64, i64, i64, *mut u8) -> i32;

/// Compiled kernels of a plan, by number.
pub struct Compiled {
    pub kernels: Vec<KernelFn>,
    library: Rc<Libraries>,
}

/// What was loaded, as long as somebody has kernels of it.
struct Libraries {
    loaded: Vec<libloading::Library>,
    folder: PathBuf,
}

impl Drop for Libraries {
    fn drop(&mut self) {
        self.loaded.clear();
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// A plan's kernels, compiled. `None` without a C compiler.
pub fn compile(code: &[KernelSource], target: &dyn Target) -> Option<Compiled> {
    compile_all(&[code], target)?.pop()
}

/// The kernels of several plans, compiled together: most of a text is what all kernels share.
pub fn compile_all(plans: &[&[KernelSource]], target: &dyn Target) -> Option<Vec<Compiled>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("kiln-inductor-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut shards: HashMap<usize, BTreeMap<&str, &KernelSource>> = HashMap::new();
    for kernel in plans.iter().copied().flatten() {
        shards.entry(kernel.lanes).or_default().insert(&kernel.name, kernel);
    }
    let mut libraries = Libraries { loaded: Vec::new(), folder: folder.clone() };
    let mut found: HashMap<String, KernelFn> = HashMap::new();
    for (lanes, kernels) in shards {
        let (source, object) = (folder.join(format!("k{lanes}.c")), folder.join(format!("k{lanes}.so")));
        let kernels: Vec<&KernelSource> = kernels.into_values().collect();
        std::fs::write(&source, target.source(&kernels)).unwrap();
        let output = Command::new(compiler())
            .args(FLAGS)
            .args(target.flags())
            .args(sanitizer())
            .args(["-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-o"])
            .arg(&object)
            .arg(&source)
            .arg("-lm")
            .output();
        let Ok(output) = output else {
            eprintln!("no C compiler: nothing is run");
            return None;
        };
        assert!(
            output.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&output.stderr),
            std::fs::read_to_string(&source).unwrap()
        );
        // SAFETY: the library was just built from our text and has no initialisers.
        let library = unsafe { libloading::Library::new(&object) }.unwrap();
        for kernel in kernels {
            // SAFETY: the function has this signature by construction.
            let symbol = unsafe { library.get::<KernelFn>(kernel.name.as_bytes()) }.unwrap();
            found.insert(kernel.name.clone(), *symbol);
        }
        libraries.loaded.push(library);
    }
    let library = Rc::new(libraries);
    let kernels = |code: &&[KernelSource]| code.iter().map(|kernel| found[&kernel.name]).collect();
    Some(plans.iter().map(|code| Compiled { kernels: kernels(code), library: library.clone() }).collect())
}
