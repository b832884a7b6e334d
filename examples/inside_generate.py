"""Stay inside Hugging Face's own generate, or a pipeline: pass SpecDiff as ``custom_generate``."""

from transformers import TextStreamer, pipeline

from specdiff import SpecDiff, load_drafter, load_target

ar, tokenizer = load_target()
sd = SpecDiff(ar, load_drafter(target=ar))
messages = [{"role": "user", "content": "Give one fact about the moon."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

out = ar.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=sd)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

# transformers keeps streamers and stop strings to itself, so they are bound to the callee.
bound = sd.bind(streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
ar.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=bound)

generator = pipeline("text-generation", model=ar, tokenizer=tokenizer)
reply = generator(messages, max_new_tokens=40, do_sample=False, custom_generate=sd)
print(reply[0]["generated_text"][-1]["content"])
