"""A seeded grammar of short children's stories.

`story(rng)` returns `(text, facts)`: a story of three or four short paragraphs,
and what it is about, so that a request for exactly this story can be written
with `request(rng, facts)`.

Templates use two devices:
  [a|b|c]   one of the alternatives, which may contain more of both devices
  {slot}    a value of this story; `^{slot}` starts it with a capital letter
Sentence starts are capitalised by `finish`.
"""

import re

HEROES = """fox|rabbit|bear|mouse|owl|hedgehog|squirrel|turtle|frog|duck|cat|dog|puppy|kitten|lamb|goat|pony|horse
donkey|cow|pig|hen|chick|goose|swan|sparrow|robin|crow|parrot|penguin|seal|whale|dolphin|octopus|crab|starfish
lion|tiger|elephant|giraffe|zebra|hippo|monkey|panda|koala|kangaroo|camel|wolf|deer|moose|badger|otter|beaver
mole|bat|snail|bee|butterfly|ladybug|ant|spider|firefly|dragonfly|caterpillar|worm|lizard|snake|crocodile|toad
dragon|unicorn|giant|troll|elf|fairy|gnome|wizard|witch|mermaid|knight|ghost|monster|phoenix|pixie
robot|train|tugboat|balloon|kite|lantern|snowman|scarecrow|teapot|toy soldier|cloud|star|raindrop|clock|tractor
baker|sailor|gardener|painter|shepherd|fisherman|tailor|astronaut|pirate|inventor|explorer|musician|farmer|lighthouse keeper""".replace("\n", "|").split("|")
GIRLS = ["girl", "princess", "queen", "grandmother"]
BOYS = ["boy", "prince", "king", "grandfather"]
FRIENDS = """fox|rabbit|bear|mouse|owl|hedgehog|squirrel|turtle|frog|duck|cat|dog|lamb|goat|pony|donkey|goose|swan|sparrow
robin|crow|parrot|penguin|otter|beaver|mole|badger|deer|snail|bee|firefly|toad|hare|magpie|pigeon|heron|robot|gnome|fairy""".replace("\n", "|").split("|")
NAMES_F = """Mia|Luna|Nora|Ella|Rosa|Lily|Daisy|Poppy|Willow|Hazel|Ivy|Clara|Tilly|Molly|Penny|Ruby|Maya|Zara|Anna|Lena
Olive|Pearl|Juno|Wren|Fern|Bella|Coco|Dora|Greta|Heidi|Iris|Josie|Kiki|Lottie|Minna|Nell|Opal|Pippa|Tess|Vera""".replace("\n", "|").split("|")
NAMES_M = """Pip|Milo|Leo|Finn|Oscar|Toby|Max|Sam|Ben|Hugo|Otto|Jasper|Rusty|Bruno|Felix|Gus|Theo|Barney|Rolo|Ned
Archie|Basil|Cosmo|Dexter|Eddie|Fergus|Henry|Ivan|Jack|Karl|Louis|Monty|Nico|Olaf|Percy|Quill|Rory|Sunny|Tom|Wally""".replace("\n", "|").split("|")
NAMES_X = "Bolt|Button|Pebble|Maple|Bramble|Acorn|Biscuit|Pepper|Ziggy|Marble|Clover|Sky|Dot|Echo|Nutmeg|Ember|Sprout|Twig|Pixel|Comet".split("|")
ADJ = "little|small|young|tiny|brave|shy|curious|cheerful|gentle|kind|clever|quiet|friendly|lonely|playful|old|red|blue|silver|fluffy|sleepy|clumsy".split("|")
LOVES = """singing|dancing|climbing|reading|painting|counting the stars|collecting smooth stones|exploring|telling jokes|baking
making things|looking at the clouds|listening to stories|watching the rain|asking questions|jumping in puddles|drawing maps
picking berries|playing hide and seek|humming old songs|chasing the wind|growing flowers""".replace("\n", "|").split("|")
FOODS = "warm bread|blueberry pie|honey cake|apple tart|carrot soup|berry jam|cheese sandwiches|pumpkin pie|ginger biscuits|pancakes|hot chocolate|mushroom soup|plum cake|cherry buns".split("|")
LOST = "red ball|blue scarf|silver bell|golden key|favourite book|wooden flute|green hat|lucky button|little drum|toy boat|yellow kite|shiny whistle|soft blanket|brass compass|paper crown|striped mitten".split("|")
MADE = "boat|kite|treehouse|bridge|swing|cart|raft|windmill|snow castle|flying machine|sled|drum".split("|")
COLOURS = "blue|green|golden|silver|pink|purple|white|orange".split("|")
PLACES = [
    ("forest", "[in|at the edge of|deep inside] a [green|quiet|big|dark green] forest", ["under the old oak tree", "behind a mossy log", "beside the stream", "between the tall ferns"]),
    ("sea", "[by|near|beside] the [wide|blue|sparkling] sea", ["behind a round rock", "in a pile of shells", "beside the old pier", "at the foot of the dunes"]),
    ("mountains", "[high up in|at the foot of] the [snowy|misty|tall] mountains", ["at the mouth of a cave", "beside a frozen pond", "behind a tall pine", "under a heap of snow"]),
    ("village", "in a [small|sleepy|cosy|tiny] village", ["beside the old well", "behind the bakery", "under the wooden bench", "next to the garden gate"]),
    ("farm", "on a [busy|sunny|small] farm", ["behind the red barn", "in the tall hay", "under the apple tree", "beside the pond"]),
    ("castle", "in an old [stone|grey] castle", ["at the bottom of the stairs", "behind a dusty curtain", "in the highest tower", "beside the garden wall"]),
    ("city", "in a [big|busy|noisy] city", ["behind the train station", "under a park bench", "beside the fountain", "on top of a tall roof"]),
    ("island", "on a [small|sunny|faraway|green] island", ["under a palm tree", "behind the waterfall", "beside the lagoon", "on the warm white sand"]),
    ("meadow", "in a [wide|sunny|flowery] meadow", ["under a patch of clover", "beside the brook", "behind a round stone", "among the daisies"]),
    ("river", "[beside|near] a [slow|winding|clear] river", ["under the little bridge", "among the reeds", "on a flat grey stone", "beside the old mill"]),
    ("desert", "at the edge of a [warm|golden|quiet] desert", ["behind a tall cactus", "beside the old well", "under a red rock", "on top of a dune"]),
    ("garden", "in a [secret|big|lovely|wild] garden", ["under the rose bush", "behind the watering can", "beside the pond", "next to the sunflowers"]),
    ("moon", "on the [quiet|bright] side of the moon", ["behind a round rock", "at the edge of a crater", "under the silver dust", "beside a tiny lamp"]),
]

OPENINGS = [
    "[Once upon a time|Once upon a time,|Once,|Long ago,|Long, long ago,|Many years ago,] there [was|lived] {a_ah} [named|called] {N}. {N} lived {place} and loved {love}.",
    "[Once upon a time|Once upon a time,|Once,|A long time ago,] there [was|lived] {a_ah} who lived {place}. [{His} name was {N}|Everyone called {him} {N}], and {he} loved {love} [more than anything|very much|all day long].",
    "[Once upon a time|Once upon a time,] {place}, there lived {a_ah} named {N}. {N} was [kind|curious|brave|cheerful] and [always ready to help|full of questions|fond of {love}|never in a hurry].",
    "{place}, there lived {a_ah} [named|called] {N}. Every [morning|day|evening], {N} [went out to look at the world|said hello to the sun|took a long walk|sat down and thought about {love}].",
    "{N} was {a_ah} who lived {place}. {He} loved {love}, and {he} [had|wanted] many [friends|good friends].",
    "[Once upon a time|Once upon a time,] there [was|lived] {a_ah} who loved {love}. {His} name was {N}, and {he} lived {place}.",
    "there was once {a_ah} named {N}. {He} lived {place}, [where the days were long and quiet|where everyone knew everyone|where the wind told old stories|where something new happened every day].",
    "[Once upon a time|Once upon a time,] {a_ah} named {N} lived {place}. {He} was [small|young|gentle], but {he} had a [big|brave|warm] heart.",
    "[Once upon a time there was|In a land far away there was|There once was] {a_ah}. {His} name was {N}. {He} lived {place} and loved {love}.",
]

TIME = "[One morning|One day|One sunny day|One afternoon|One windy day|One bright morning|One evening]"

PLOTS = [
    dict(name="lost", themes=["a lost {lost}", "something that was lost", "losing a {lost}", "friends who help each other"], text=[
        TIME + ", {N} [could not find|lost] {his} {lost}. {He} looked [high and low|everywhere|in every corner], but it was gone. \"[Oh no|Oh dear]! What shall I do?\" {he} [said|cried].",
        "{F} the {f} heard {him} and came [at once|running|over]. \"[Do not worry|Don't be sad],\" said {F}. \"[We will look together|Two can look better than one].\" They [looked|searched] {spot}, but [found only leaves|there was nothing there]. Then they [looked|searched] {spot2}, and something [shone|moved|peeped out] in the light. It was the {lost}!",
        "{N} [hugged {F}|laughed with joy|jumped up and down]. \"Thank you,\" {he} said. \"[I found my {lost}, and I found a good friend too|You are the best friend in the world].\" From that day on, {N} and {F} [always looked after each other|played together every day].",
    ]),
    dict(name="help", themes=["kindness", "helping others", "a kind {h}", "a {f} in trouble"], text=[
        TIME + ", {N} heard a small voice. \"[Help! Please help me|Is anyone there? I need help]!\" It was {F} the {f}, who was [stuck in the mud|caught in a thorny bush|trapped under a branch]. {N} was [a little afraid|very small], but {he} [did not run away|ran to help].",
        "{H} [pulled|pushed] [once|hard], but nothing happened. {He} [pulled|pushed] [again|harder], and [pop|at last], {F} was free! \"Thank you,\" said {F}. \"[I will not forget this|One day I will help you too].\"",
        "[Some days later|A week later|When winter came], {N} [lost the way home in the fog|could not cross the cold water|was hungry and alone]. [Suddenly|Then] {F} [came along|was there]. \"[Now it is my turn to help|You helped me, and now I will help you],\" said {F}. [They went home side by side.|Soon {N} was safe and warm.] {N} [learned|knew then] that kindness always comes back.",
    ]),
    dict(name="fear", themes=["being brave", "courage", "a {h} who was afraid of {fear}", "being afraid of {fear}", "a brave {h}"], text=[
        "but {N} had a secret. {He} was afraid of {fear}. [Every time {he} thought of it, {his} knees began to shake|When {his} friends went out to play, {he} stayed at home|{He} never told anyone about it].",
        TIME + ", {F} the {f} [asked|said], \"[Why do you look so sad|What is the matter], {N}?\" {N} told {F} everything. \"[Everyone is afraid of something|I was afraid once too],\" said {F}. \"[Hold my hand|Stay close to me], and we will [try together|take one small step].\" So they took one small step, and then another.",
        "[To {his} surprise|Little by little], {N} felt [better|braver|calm]. {Fear^} [was not so bad after all|did not seem so terrible any more]. \"[I did it|I am still a little afraid, but I did it]!\" {N} [cried|said proudly]. {F} smiled. \"That is what being brave means,\" {fhe} said.",
    ]),
    dict(name="share", themes=["sharing", "a {h} who learned to share", "{food}", "a hungry {f}"], text=[
        TIME + ", {N} had {food} for [lunch|supper]. It smelled [wonderful|so good]. \"[This is all for me|I will eat it all by myself],\" {he} thought. Then {F} the {f} came by. {F} [looked tired and hungry|had not eaten all day].",
        "{N} looked at the {food_s} and then at {F}. [It was hard to give some away|{He} thought for a long time], but {he} [said|smiled and said], \"[Please sit down|Come and eat with me]. There is enough for two.\" They ate [together|side by side], and {F} told [funny stories|stories about faraway places].",
        "[When the plate was empty|That night], {N} felt [full and happy|happier than ever]. \"[Food tastes better when you share it|It was only half as much, but it tasted twice as good],\" {he} said. [The next day|The next morning], {F} came back with [a basket of berries|a big basket of apples|a surprise], and they shared that too.",
    ]),
    dict(name="storm", themes=["a storm", "a rainy day", "a big storm", "bad weather and good friends"], text=[
        TIME + ", dark clouds [filled the sky|rolled in]. The wind began to [howl|blow], and [big drops of rain fell|the rain came down hard]. {N} [ran home|hurried home] and [shut the door|lit a small lamp]. Then {he} heard a [knock|tap, tap, tap].",
        "it was {F} the {f}, wet and [cold|shivering]. \"[My home has blown away|The water came into my house],\" said {F}. \"[Can I stay here|May I come in]?\" \"[Of course|Yes, come in],\" said {N}. {He} gave {F} a [warm blanket|dry towel] and made {food}. [Outside, the storm roared|The thunder rumbled], but inside it was [warm|cosy].",
        "in the morning, the sun [was shining|came out], and a rainbow [stood over the {pw}|shone in the sky]. {N} and {F} went out and built a new home, [stronger than the old one|right next door]. \"[A storm is not so scary when you have a friend|Even a bad day can bring something good],\" said {N}.",
    ]),
    dict(name="build", themes=["building a {made}", "a {made}", "never giving up", "a {h} who built a {made}"], text=[
        TIME + ", {N} had an idea. \"I will build a {made}!\" {he} said. {He} [found some wood and a piece of rope|gathered sticks and string] and [worked all day|went to work]. But when {he} tried it, the {made} [fell apart|broke in two].",
        "{N} [sighed|was sad], but {he} did not give up. {He} built it again, and it [fell apart|broke] again. Then {F} the {f} came to watch. \"[Maybe you need a stronger knot|Perhaps it should be a little wider],\" said {F}. \"[I can hold this end|Let me help you].\" So they worked together until [the sun went down|the stars came out].",
        "the third {made} was [strong|perfect|a little crooked, but it worked]! [Everyone|All their friends] came to see it and [clapped|cheered]. \"[We did it|It works],\" said {N}. \"[The first two times were not mistakes. They were practice|All it took was one more try and a good friend].\"",
    ]),
    dict(name="wish", themes=["a wish", "magic", "a magic stone", "a wish that came true"], text=[
        TIME + ", {N} found a [shiny|glowing] {colour} stone {spot}. When {he} picked it up, it [began to glow|whispered], \"[I can give you one wish. Choose well|Make one wish, and it will come true].\"",
        "{N} thought [hard|for a long time]. {He} could wish for [gold|a palace|a mountain of sweets|wings]. Then {he} saw {F} the {f}, who [was sick in bed|had lost the way home|sat alone and cried]. {N} [held the stone tight|closed {his} eyes] and said, \"I wish for {F} to be happy again.\"",
        "the stone [flashed|shone like a small sun], and {F} [smiled|laughed and danced about]. The magic was gone, and the stone was only a stone. But {N} did not mind. {He} had a new friend, and that was [better than any treasure|the best wish of all].",
    ]),
    dict(name="race", themes=["a race", "winning and losing", "a {h} in a race", "a race between a {h} and a {f}"], text=[
        TIME + ", there was a great race [around the {pw}|to the top of the hill]. {N} wanted to win more than anything. \"[Ready, steady, go|On your marks, get set, go]!\" [everyone|the crowd] shouted, and off they went. {N} was [fast|quick as the wind], and soon {he} was in front.",
        "halfway along the path, {N} heard a cry. {F} the {f} had fallen and [hurt a foot|could not get up]. {N} looked at the finish line. [It was so close|He could almost touch it]. Then {he} [turned around|ran back] and helped {F} up. \"[Lean on me|We will finish together],\" said {N}.",
        "They came in last, [step by step|side by side]. But [everyone|the whole crowd] stood up and [cheered|clapped]. \"[There is the real winner|Someone who stops to help has won the most],\" said [the old judge|the wise old owl]. {N} [smiled|blushed]. {He} had no prize, but {he} had [a friend|a full heart].",
    ]),
    dict(name="truth", themes=["telling the truth", "saying sorry", "honesty", "a broken pot"], text=[
        TIME + ", {N} was [running|playing] in the house of {F} the {f}. Crash! A [beautiful|big] {colour} [vase|pot|jug] fell down and broke. Nobody had seen it. \"[I could say it was the wind|Nobody has to know],\" thought {N}.",
        "but all [day|night] long, {N} had a heavy feeling in {his} [tummy|heart]. {He} [could not eat|could not sleep]. At last {he} went to {F} and said, \"It was me. I broke it, and I am [very sorry|so sorry].\"",
        "{F} was quiet for a moment. Then {fhe} smiled. \"[Thank you for telling me the truth|That was a brave thing to say],\" said {F}. \"[A pot can be mended|I can get a new one], but [a true friend is hard to find|trust is worth more].\" They [glued the pieces together|mended it together], and {N} felt light as a feather.",
    ]),
    dict(name="newcomer", themes=["making a new friend", "friendship", "a new friend", "a lonely {f}", "a shy {f}"], text=[
        TIME + ", someone new came to the {pw}. It was {F} the {f}. {F} was [very shy|quiet] and sat all alone {spot}. The others [did not know what to say|played without {fhim}].",
        "{N} [saw this and felt sorry|remembered how it felt to be alone]. {He} [walked over|sat down next to {fhim}] and said, \"[Hello, I am {N}. Would you like to play|My name is {N}. Do you like {food}]?\" {F} [looked up|nodded slowly] and smiled [a very small smile|for the first time]. They [played until sunset|talked all afternoon].",
        "[The next day|Soon], {F} [taught everyone a new game|sang a song that nobody had heard before], and all the others came to [listen|play]. \"[I thought I had no friends here|I was afraid to come here],\" said {F}. \"[You only need one friend to begin with|All it takes is one hello],\" said {N}.",
    ]),
    dict(name="treasure", themes=["a treasure", "a treasure map", "an adventure", "finding a treasure"], text=[
        TIME + ", {N} found an old map {spot}. There was a big red cross on it. \"A treasure!\" {he} [cried|shouted]. {He} ran to {F} the {f}, and together they [set off|began their adventure].",
        "they [crossed a shaky bridge|climbed a steep hill] and [walked through a dark tunnel|followed a winding path]. {F} got [tired|hungry], so they stopped and shared some {food_s}. At last they found the place. They dug and dug, and they found a [wooden|dusty old] box. In it was [only a note|nothing but a letter].",
        "\"[The treasure is the one who came all this way with you|Look beside you. A good friend is the best treasure of all],\" it said. {N} looked at {F}, and they both began to laugh. \"[It is true|I would not trade this day for gold],\" said {N}. They put the note back for the next [treasure hunter|explorer] and went home, singing.",
    ]),
    dict(name="learn", themes=["learning something new", "learning to {skill}", "practice", "a {h} who could not {skill}", "a {h} who wanted to {skill}"], text=[
        "there was one thing {N} could not do. {He} could not {skill}. [All the others could do it|It looked so easy when others did it], and {N} [felt sad|wished {he} could do it too].",
        "\"[Can you teach me|Please show me how],\" {N} asked {F} the {f}. \"[Of course|I will],\" said {F}, \"[but you must practise every day|but you must not give up].\" On the first day it went [very badly|all wrong]. On the second day it went [a little better|a tiny bit better]. {N} [kept trying|tried and tried], even when {he} was tired.",
        "[Then one day|After many days], it worked! \"Look at me! I can {skill}!\" {N} called. {F} [clapped|cheered]. \"[You did not learn it in one day|I only showed you the way],\" said {F}. \"[You learned it because you never stopped trying|You did all the work yourself].\"",
    ]),
    dict(name="gift", themes=["a birthday", "a birthday present", "a gift", "a surprise"], text=[
        "it was almost the birthday of {F} the {f}, and {N} wanted to give {fhim} something special. But {he} had no [money|gold]. {He} thought about [a big cake|a golden crown], but {he} could not buy [it|anything].",
        "\"[I will make something myself|I can make a gift with my own hands],\" said {N}. {He} [picked flowers|gathered shells|found bright feathers] and [tied them together with a ribbon|made a crown out of them]. {He} even wrote a little [song|poem]. It took all [night|day], and {he} [worried|was not sure] that it was not good enough.",
        "[On the big day|The next morning], {F} opened all the presents. There were [toys|hats] and [sweets|books]. But when {N} sang the [little|birthday] song, {F} had tears in {fhis} eyes. \"[This is the best present of all|Nobody ever made something just for me],\" said {F}. And they ate {food} [until they were full|until the moon came up].",
    ]),
    dict(name="star", themes=["a star", "a fallen star", "the night sky", "the stars"], text=[
        "one [quiet|clear] night, a tiny star fell from the sky and landed {spot}. {N} heard it [crying|sniffing]. \"[I want to go home|I fell down and I cannot get back],\" said the star. \"[Don't cry|Do not be afraid],\" said {N}. \"I will help you.\"",
        "{N} [put the star in a basket|carried the star gently] and climbed the highest hill, but the sky was still too far away. {He} [threw the star up|jumped], but it [fell back|did not work]. Then {F} the {f} came by. \"[A star can only fly when it is happy|Stars rise when someone sings to them],\" said {F}. So they sat down together and sang [a soft song|every song they knew].",
        "the star began to [shine|glow], brighter and brighter, and it [floated|rose] up into the sky. \"[Thank you|I will never forget you],\" it called. Since then, one star [twinkles a little more than the others|winks every night], and {N} always [winks|waves] back.",
    ]),
    dict(name="noise", themes=["a strange noise", "a mystery", "a night in the dark", "a strange sound at night"], text=[
        "one [dark|windy] night, {N} heard a strange noise. [Boom, boom, boom|Whooo, whooo|Creak, creak, creak]! {He} pulled the blanket over {his} head. \"[Is it a monster|What can it be]?\" {he} whispered.",
        "there was a [knock|tap] at the window. It was {F} the {f}. \"[Did you hear that too|I cannot sleep],\" said {F}. \"[Let's find out what it is|Let us go and look together],\" said {N}, and {he} took a [small lamp|lantern]. They tiptoed [out of the door|into the dark]. They followed the noise and looked {spot}.",
        "{N} lifted the lamp, and they both began to [laugh|giggle]. It was only [an old bucket rolling in the wind|a loose shutter in the wind|a baby bird trying to sing]! \"[Things look scary until you look at them|The dark makes small things big],\" said {F}. They went back to bed and slept [until noon|soundly all night].",
    ]),
    dict(name="seed", themes=["a seed", "patience", "growing a flower", "a tree that grew"], text=[
        TIME + ", {F} the {f} gave {N} a tiny seed. \"[Plant it and be patient|Look after it well],\" said {F}. {N} planted it {spot} and [gave it water|watered it]. Then {he} sat down and waited. Nothing happened.",
        "the next day, still nothing happened. \"[It is broken|It does not like me],\" said {N}. \"[Give it time|Good things grow slowly],\" said {F}. So {N} brought water every day. {He} [sang to it|told it stories] and [kept it warm at night|pulled out the weeds].",
        "[One spring morning|At last, one morning], a small green leaf peeped out of the earth. It grew and grew until it was a [tall sunflower|beautiful {colour} flower|tall apple tree]. [Everyone came to see it|The bees came to visit]. \"[I only waited and watered|You were right],\" said {N}. \"[Good things take time|It was worth waiting for].\"",
    ]),
    dict(name="lamp", themes=["a light in the dark", "a lighthouse", "being small", "a small {h} who did a great thing"], text=[
        "the others [laughed at|teased] {N} because {he} was so small. \"[You cannot do anything important|You are too little to help],\" they said. {N} [said nothing|felt sad], but every evening {he} lit a [little|tiny] lamp and put it in the window.",
        "one night, a thick fog came over the {pw}. {F} the {f} was [on the way home|far from home] and could not see the path. \"[I am lost|Where am I],\" said {F}. Then {fhe} saw a tiny light [in the fog|far away]. {Fhe} followed it, step by step, all the way to {N}.",
        "\"[Your lamp saved me|Without your light I would still be lost],\" said {F}. The next day, [everyone|all the others] came to say sorry. \"[A small light is enough when it is dark|You do not have to be big to do something great],\" said {F}. And from then on, {N} was the keeper of the light.",
    ]),
    dict(name="letter", themes=["a letter", "a long journey", "a message", "a long trip"], text=[
        TIME + ", a letter came for {F} the {f}, but {F} lived far away, on the other side of the {pw}. \"[Who will carry it|Who will bring it there]?\" [everyone|the people] asked. \"I will,\" said {N}.",
        "it was a long way. {N} walked [over the hills|along the road] and [through the rain|against the wind]. {He} [slept under a hedge|rested under a tree] and ate {food}. [Once, the wind took the letter|At the river, the letter almost fell into the water], but {N} [caught it|ran after it and caught it] just in time.",
        "at last, {N} [knocked at the door|found the house]. {F} opened the letter and [laughed|cried for joy]. \"[It is from my sister! She is coming to visit|My old friend has written to me at last]!\" {F} gave {N} [a warm bed|a hug] and {food2}. \"[You brought me more than a letter|You came all this way for me],\" said {F}. \"[You brought me hope|Now I have two friends].\"",
    ]),
    dict(name="music", themes=["music", "a song", "singing", "a {h} who loved music"], text=[
        "{N} had a beautiful voice, but {he} only sang when nobody was [near|listening]. \"[What if they laugh at me|What if I forget the words]?\" {he} thought. [One evening|One night], {F} the {f} walked by and heard {him} [singing|humming].",
        "\"[That was lovely|I have never heard such a nice song],\" said {F}. \"[There is a party tomorrow. Will you sing for us|Please sing it for everyone].\" {N} [shook {his} head|turned red]. \"[I am too shy|I do not dare],\" {he} said. \"[Then I will stand beside you|Just look at me and sing for me alone],\" said {F}.",
        "[So the next day|At the party], {N} stood up and began to sing, first very softly, then louder and louder. Nobody laughed. [Some danced and some clapped|Everyone listened, and then everyone clapped]. \"[Sing it again|More, more]!\" they called. {N} smiled at {F} and sang until the moon came up.",
    ]),
    dict(name="clock", themes=["being late", "slowing down", "a busy {h}", "taking your time"], text=[
        "{N} was always in a hurry. {He} ran to breakfast, {he} ran to [the well|the market], and {he} even ran to bed. \"[No time, no time|I have so much to do]!\" {he} always said.",
        TIME + ", {N} ran so fast that {he} [tripped over a root|slipped on a wet stone] and [hurt {his} foot|fell flat on the ground]. {F} the {f} sat down beside {him}. \"[Now you have time|Let us rest a little],\" said {F}. \"[Listen|Look].\" {N} [heard the birds and the wind|saw the clouds and the flowers]. {He} had never [noticed them|looked at them] before.",
        "They sat {spot} and [watched the sun go down|shared some {food_s}]. \"[It was here all the time|The world is so beautiful],\" said {N}, \"[and I ran right past it|and I never saw it].\" From then on, {N} still [worked hard|ran now and then], but every day {he} stopped for a while, just to look.",
    ]),
    dict(name="snow", themes=["winter", "the snow", "a cold winter", "the first snow"], text=[
        "winter came to the {pw}, and one night it began to snow. In the morning, everything was white. {N} had never seen snow before. \"[The clouds have fallen down|Someone has painted the world]!\" {he} [cried|said].",
        "{F} the {f} laughed. \"[That is snow|It is only snow],\" said {F}. \"[Come, I will show you|Let's play].\" They [made a snowman with a carrot nose|slid down the hill on a tray] and [threw snowballs|made angels in the snow]. Soon [their noses were red and their feet were cold|they were cold and wet], but they [did not stop|were very happy].",
        "in the evening, they sat [by the fire|under a warm blanket] and had {food}. \"[Will the snow be there tomorrow|I hope it never melts],\" said {N}. \"[One day it will melt|It will go away in spring],\" said {F}, \"[but it comes back every year, just like me|but then there will be flowers].\" And {N} fell asleep with a smile.",
    ]),
    dict(name="moon", themes=["the moon", "a trip to the moon", "a dream", "a bedtime story", "going to sleep"], text=[
        "one night, {N} could not sleep. The moon was [big and round|full and bright]. \"[Moon, are you awake too|Are you lonely up there], Moon?\" {he} asked. \"[A little|Yes],\" said the moon. \"[Come up and visit me|Nobody ever talks to me].\"",
        "a [long silver ladder|bridge of moonlight] came down from the sky. {N} called {F} the {f}, and together they climbed up, [step by step|higher and higher]. They [drank star tea|jumped as high as houses] and [told the moon all about the {pw}|danced on the soft white dust]. The moon laughed [for the first time in a hundred years|until the stars shook].",
        "\"[Thank you for coming|Now I am not lonely any more],\" said the moon. [It carried them home on a beam of light|Then they slid all the way down to bed]. In the morning, {N} thought it had been a dream. But there was silver dust on {his} [feet|pillow], and {F} had some too.",
    ]),
    dict(name="teamwork", themes=["working together", "teamwork", "a problem that took many friends", "a heavy stone"], text=[
        TIME + ", a [huge|great big] stone rolled down and blocked the [path|road] to the {pw}. {N} pushed it, but it did not move. {F} the {f} [pushed|pulled] it, but it did not move. \"[It is too heavy|We will never move it],\" said {F}.",
        "{N} [thought for a while|had an idea]. \"[Alone we are weak|None of us can do it alone],\" {he} said, \"but [together we are strong|we are many].\" So {N} called {G} the {g}, and {G} called [all the neighbours|everyone else]. They all stood in a row. \"One, two, three, push!\" called {N}.",
        "the stone [began to wobble|moved a little], and then it rolled away with a great [thump|splash]. [Everyone cheered|They all shouted hooray]! \"[Who was the strongest|Who did it], you or I?\" asked {F}. \"[All of us|It was all of us together],\" said {N}, and they had {food} to celebrate.",
    ]),
]
ENDINGS = ["", "", "", "", "", "", " And they lived happily ever after.", " The end.", " And that is the end of the story.", " And if you go to the {pw} today, you may still see them there."]
# Plots that would not make sense in a place.
UNFIT = {"moon": ("star", "moon", "snow", "storm", "seed", "lamp"), "desert": ("snow", "lamp"), "island": ("snow", "letter"), "city": ("help",)}
FEARS = "the dark|deep water|thunder|high places|loud noises|being alone|big dogs|the old tunnel".split("|")
SKILLS = "swim|dance|whistle|fly a kite|skate|ride a bicycle|read|juggle|bake bread|play the flute|jump high|paint".split("|")


def pseudo(rng, low=2, high=3):
    """A made-up word, so that unknown words are copied and not replaced."""
    return "".join(rng.choice("b c d f g h k l m n p r s t v z br st tr pl gl".split()) + rng.choice("a e i o u oo ee a o".split())
                   for _ in range(rng.randint(low, high))) + rng.choice(["", "", "n", "r", "x", "l", "t"])


def article(noun):
    return ("an " if noun[0] in "aeiou" and not noun.startswith(("uni", "one")) else "a ") + noun


def expand(rng, text, slots):
    """Resolves [..|..] from the inside out, then the slots, until none is left."""
    while True:
        done = re.sub(r"\[([^\[\]]*)\]", lambda m: rng.choice(m.group(1).split("|")), text)
        if done == text:
            break
        text = done
    if "{" in text:
        text = re.sub(r"\{(\w+)(\^?)\}", lambda m: str(slots[m.group(1)]), text)
        return expand(rng, text, slots)
    return text


def finish(text):
    """Capital letters at the beginning of sentences, and tidy articles."""
    text = re.sub(r"(^|\n|[.!?] |\.\" )(\"?)([a-z])", lambda m: m.group(1) + m.group(2) + m.group(3).upper(), text)
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


def pick_hero(rng):
    roll = rng.random()
    if roll < 0.08:
        kind, gender = rng.choice(GIRLS), "f"
    elif roll < 0.16:
        kind, gender = rng.choice(BOYS), "m"
    elif roll < 0.26:
        kind, gender = pseudo(rng), rng.choice("mf")
    else:
        kind = rng.choice(HEROES)
        gender = "f" if kind in ("hen", "witch", "mermaid", "cow") else "m" if kind == "wizard" else rng.choice("mf")
    return kind, gender


def pick_name(rng, gender):
    roll = rng.random()
    if roll < 0.08:
        return pseudo(rng).capitalize()
    if roll < 0.3:
        return rng.choice(NAMES_X)
    return rng.choice(NAMES_F if gender == "f" else NAMES_M)


def story(rng):
    kind, gender = pick_hero(rng)
    name = pick_name(rng, gender)
    friend = rng.choice(FRIENDS) if rng.random() < 0.8 else rng.choice(HEROES)
    while friend == kind:
        friend = rng.choice(FRIENDS)
    fgender = rng.choice("mf")
    fname = pick_name(rng, fgender)
    while fname == name:
        fname = pick_name(rng, fgender)
    third = rng.choice([f for f in FRIENDS if f not in (kind, friend)])
    gname = rng.choice([n for n in NAMES_F + NAMES_M if n not in (name, fname)])
    adj = rng.choice(ADJ)
    pw, place, spots = rng.choice(PLACES)
    spot, spot2 = rng.sample(spots, 2)
    food, food2 = rng.sample(FOODS, 2)
    fear = rng.choice(FEARS)
    she = gender == "f"
    fshe = fgender == "f"
    slots = dict(
        h=kind, N=name, f=friend, F=fname, g=third, G=gname, a_ah=article(adj + " " + kind) if rng.random() < 0.85 else article(kind),
        H=name if rng.random() < 0.6 else "the " + kind, place=place, pw=pw, spot=spot, spot2=spot2,
        love=rng.choice(LOVES), food=food, food2=food2, food_s=food, lost=rng.choice(LOST), made=rng.choice(MADE),
        colour=rng.choice(COLOURS), fear=fear, Fear=fear[0].upper() + fear[1:], skill=rng.choice(SKILLS),
        he="she" if she else "he", him="her" if she else "him", his="her" if she else "his",
        He="She" if she else "He", His="Her" if she else "His",
        fhe="she" if fshe else "he", fhim="her" if fshe else "him", fhis="her" if fshe else "his", Fhe="She" if fshe else "He",
    )
    plot = rng.choice([p for p in PLOTS if p["name"] not in UNFIT.get(pw, ())])
    parts = [expand(rng, rng.choice(OPENINGS), slots)] + [expand(rng, p, slots) for p in plot["text"]]
    parts[-1] += expand(rng, rng.choice(ENDINGS), slots)
    if rng.random() < 0.5:  # three paragraphs or four
        parts[0:2] = [parts[0] + " " + finish(parts[1])]
    text = finish("\n\n".join(finish(p) for p in parts))
    facts = dict(kind=kind, adj=adj, name=name, friend=friend, fname=fname, place=pw, theme=finish_theme(expand(rng, rng.choice(plot["themes"]), slots)), slots=slots)
    return text, facts


def finish_theme(text):
    return re.sub(r"\ba (?=[aeio])", "an ", text)


ASK = ["Tell me a story {about}", "Tell a story {about}", "Tell me a short story {about}", "Write a story {about}", "Write a short story {about}", "Can you tell me a story {about}",
       "Please tell me a story {about}", "I want a story {about}", "I would like to hear a story {about}", "A story {about}", "Give me a story {about}", "Could you write a little story {about}",
       "Make up a story {about}", "Story {about}", "Do you know a story {about}", "Read me a story {about}", "Tell me a bedtime story {about}", "Tell me a children's story {about}",
       "Invent a story {about}", "Tell us a tale {about}", "Let me hear a story {about}", "Tell my daughter a story {about}", "Tell my kids a story {about}", "Write me a fairy tale {about}"]
ASK_ANY = ["Tell me a story", "Tell me another story", "Another story", "Another one", "A story please", "Can you tell stories", "Tell me something nice", "Write a story", "I am bored, tell me a story", "One more story", "Story time",
           "Tell me a bedtime story", "Do you know any stories", "Once upon a time", "I cannot sleep", "Tell me a fairy tale", "Please tell a story", "Surprise me with a story", "Tell me a long story", "Can I have a story", "more stories", "tell me one more"]


def request(rng, facts):
    """A request that this story answers."""
    roll = rng.random()
    if roll < 0.16:
        return rng.choice(ASK_ANY)
    kind, name = facts["kind"], facts["name"]
    a_kind = article(kind)
    about = rng.choice([
        a_kind, a_kind, a_kind, article(facts["adj"] + " " + kind), "the " + kind, f"{a_kind} named {name}", f"{a_kind} called {name}", f"{name} the {kind}",
        f"{a_kind} and {article(facts['friend'])}", f"{a_kind} and {article(facts['friend'])}", f"{a_kind} in the {facts['place']}", f"{a_kind} and {facts['theme']}",
        facts["theme"], facts["theme"], f"two friends, {a_kind} and {article(facts['friend'])}", f"the {facts['place']}", f"{name} and {facts['fname']}", name,
    ])
    return rng.choice(ASK).replace("{about}", "about " + about)


if __name__ == "__main__":
    import random
    import sys
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(6):
        text, facts = story(rng)
        print(">>", request(rng, facts), "\n" + text, "\n")
