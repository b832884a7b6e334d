"""Stream: print text while it is made, with transformers' own streamer or as an iterator."""

from transformers import TextStreamer

from specdiff import SpecDiff, load_drafter, load_target
from specdiff.streaming import stream

ar, tokenizer = load_target()
sd = SpecDiff(ar, load_drafter(target=ar))
messages = [{"role": "user", "content": "Write two sentences about rain."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

print("-- a streamer")
sd.generate(**inputs, max_new_tokens=48, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))

print("-- an iterator; leaving the block early ends the generation")
with stream(sd, **inputs, max_new_tokens=48, tokenizer=tokenizer) as pieces:
    for piece in pieces:
        print(piece, end="", flush=True)
print()
