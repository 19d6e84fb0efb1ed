//! Kernels that go on with the rows of a product while they are warm.

use kiln_plan::{Epilogue, Then};

use crate::support::check_text;

/// The epilogue of a graph's only product.
fn epilogue(text: &str) -> (Option<Epilogue>, String) {
    let plan = check_text(text);
    let epilogues: Vec<_> = plan
        .steps
        .iter()
        .filter(|step| step.product().is_some())
        .map(|step| if let Some(Then::Rows(epilogue)) = step.then() { Some(*epilogue) } else { None })
        .collect();
    assert_eq!(epilogues.len(), 1);
    (epilogues[0], plan.report.why_not.iter().map(|why| format!("{why}\n")).collect())
}

#[test]
fn kernels_go_on_with_rows_of_products() {
    let rows = |text: &str| epilogue(text).0.map(|Epilogue { rows, items }| (rows, items));
    let bias = "graph(%0: f32[37, 5], %1: f32[5, 70], %2: f32[70]) {
  %3 = mm(%0, %1) : f32[37, 70]
  %4 = expand(%2) {shape: [37, 70]} : f32[37, 70]
  %5 = add(%3, %4) : f32[37, 70]
  %6 = tanh(%5) : f32[37, 70]
  return %6
}";
    assert_eq!(rows(bias), Some((1, 1)));
    // The product is needed itself, and there is nothing to add up.
    assert_eq!(rows(&bias.replace("return %6", "return %6, %3")), Some((1, 1)));
    assert_eq!(rows(&bias.replace("37, 5]", "37, 0]").replace("[5, 70]", "[0, 70]")), Some((1, 1)));
    assert_eq!(rows(&bias.replace("f32", "f64")), Some((1, 1)));
    // One loop over all elements, cut every 16384 of them.
    let residual = "graph(%0: f32[64, 3], %1: f32[3, 512], %2: f32[64, 512]) {
  %3 = mm(%0, %1) : f32[64, 512]
  %4 = add(%3, %2) : f32[64, 512]
  return %4
}";
    assert_eq!(rows(residual), Some((32, 1)));
    let (none, why) = epilogue(&residual.replace("512", "520"));
    assert!(none.is_none() && why.contains("its items end inside of rows"), "{why}");
    // A row at a time.
    let softmax = "graph(%0: f32[40, 6], %1: f32[6, 50]) {
  %2 = mm(%0, %1) : f32[40, 50]
  %3 = exp(%2) : f32[40, 50]
  %4 = sum(%3) {dims: [1], keepdim: false} : f32[40]
  %5 = reshape(%4) {shape: [40, 1]} : f32[40, 1]
  %6 = expand(%5) {shape: [40, 50]} : f32[40, 50]
  %7 = div(%3, %6) : f32[40, 50]
  return %7
}";
    assert_eq!(rows(softmax), Some((1, 1)));
    // Heads of a row: several items.
    let heads = "graph(%0: f32[40, 6], %1: f32[6, 60], %2: f32[20]) {
  %3 = mm(%0, %1) : f32[40, 60]
  %4 = reshape(%3) {shape: [40, 3, 20]} : f32[40, 3, 20]
  %5 = expand(%2) {shape: [40, 3, 20]} : f32[40, 3, 20]
  %6 = mul(%4, %5) : f32[40, 3, 20]
  return %6
}";
    assert_eq!(rows(heads), Some((1, 3)));
}

#[test]
fn kernels_that_need_other_rows_run_after_the_product() {
    let refused = |text: &str, reason: &str| {
        let (epilogue, why) = epilogue(text);
        assert!(epilogue.is_none() && why.contains(reason), "{epilogue:?} {why}");
    };
    refused(
        "graph(%0: f32[30, 6], %1: f32[6, 30], %2: f32[30, 30]) {
  %3 = mm(%0, %1) : f32[30, 30]
  %4 = permute(%3) {dims: [1, 0]} : f32[30, 30]
  %5 = add(%4, %2) : f32[30, 30]
  return %5
}",
        "another order",
    );
    refused(
        "graph(%0: f32[40, 6], %1: f32[6, 50]) {
  %2 = mm(%0, %1) : f32[40, 50]
  %3 = sum(%2) {dims: [0], keepdim: false} : f32[50]
  return %3
}",
        "don't go along",
    );
    // Its result might go where the product still reads.
    refused(
        "graph(%0: f32[40, 40], %1: f32[40, 40]) {
  %2 = mm(%0, %1) : f32[40, 40]
  %3 = add(%2, %0) : f32[40, 40]
  write %0 <- %3
  return
}",
        "an operand of the product",
    );
}
