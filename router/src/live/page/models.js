// The choice of a model.

const MODELS_MAX = 200;

function offerModels(models) {
  const select = byId("model");
  const chosen = select.value;
  select.dataset.models = models.join("\n");
  select.replaceChildren(...models.slice(0, MODELS_MAX).map((model) => {
    const option = element("option", "", printable(model));
    option.value = model;
    return option;
  }));
  if (models.includes(chosen)) select.value = chosen;
}
