"""Word pools of the task generators. Plain lists in a fixed order: a seed gives the same document
in every process.
"""

from random import Random

NAMES = """
Alice Ben Clara David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paula Quentin
Rosa Simon Tina Ursula Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Edward Fiona George
Hannah Ivan Julia Kevin Laura Martin Nora Oliver Peter Rachel Samuel Teresa Umar Vera Walter Yusuf
Amir Bianca Cedric Dora Elias Felix Greta Hugo Ingrid Jonas Kira Lucas Mila Noah Olga Pablo Rita
Stefan Thea Viktor Wanda Anton Beatrice Conrad Delia Erik Flora Gavin Helga Igor Joan Klaus Linda
Marco Nadia Otto Petra Ralph Sofia Tomas Vivian
""".split()
SURNAMES = """
Keller Novak Rossi Silva Jensen Weber Fischer Moreau Costa Larsen Byrne Walsh Nolan Hayes Foster
Porter Mason Carter Turner Parker Cooper Bennett Brooks Reed Shaw Webb Lloyd Doyle Quinn Murphy
Kovacs Horvat Popov Ivanova Petrov Sato Tanaka Mori Chen Wang Singh Patel Khan Haddad Mansour
Okafor Mensah Diallo Santos Vargas Mendez Torres Castro Romero Duran Lindgren Berg Holm Dahl
Virtanen Kowalski Nowak Dvorak Steiner Huber Brandt Vogel Winter Sommer Schmidt Lange Bauer
""".split()
CITIES = """
Paris Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Athens Warsaw Helsinki London Boston
Chicago Denver Seattle Toronto Sydney Tokyo Delhi Cairo Lima Bogota Havana Zurich Geneva Munich
Hamburg Milan Naples Turin Lyon Porto Krakow Budapest Riga Tallinn Bern Glasgow Leeds Bristol
Austin Dallas Miami Atlanta Phoenix Montreal Nairobi Lagos Accra Tunis Hanoi Manila Seoul Osaka
Perth Quito
""".split()
JOBS = """
baker teacher nurse pilot farmer lawyer painter plumber carpenter engineer doctor chemist
librarian gardener butcher tailor driver sailor judge writer singer dentist barber cook waiter
miner fisherman mechanic architect reporter surgeon programmer electrician photographer translator
accountant
""".split()
FOODS = """
pizza soup bread cheese rice pasta salad cake pancakes apples noodles curry tacos sushi stew
porridge beans lentils mushrooms honey chocolate dumplings waffles omelette olives grapes cherries
potatoes salmon
""".split()
PETS = """
cat dog rabbit parrot hamster turtle goldfish pony snake ferret canary goat lizard mouse duck
donkey hedgehog frog
""".split()
INSTRUMENTS = """
piano guitar violin flute drums trumpet cello harp clarinet accordion banjo trombone saxophone
organ oboe tuba
""".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLORS = """
red blue green yellow orange purple pink brown black white gray cyan magenta maroon navy olive
teal lime indigo violet gold silver beige
""".split()
ITEMS = """
lamp chair table kettle basket ladder bottle mirror carpet hammer pencil bucket
blanket candle clock cup curtain cushion desk drawer fork spoon knife plate bowl pan pot oven
fridge towel soap brush comb razor sponge broom mop shovel rake hose tent rope compass lantern
helmet glove scarf hat coat jacket shirt sock boot shoe belt wallet purse umbrella suitcase
backpack notebook folder stapler ruler eraser marker magnet battery cable charger speaker camera
tripod radio phone tablet keyboard screen printer scanner vase statue frame pillow mattress shelf
cabinet wardrobe bench stool sofa barrel crate box bag jar tin tray whistle drum kite puzzle doll
robot marble anchor paddle bicycle scooter wagon trailer engine wheel tire pedal bell horn flag
banner poster ticket coin medal trophy ring bracelet necklace button zipper needle thread fabric
ribbon
""".split()
ADJECTIVES = """
quiet bright heavy gentle rapid ancient modern broken hidden frozen golden simple curious clever
lucky silent sudden narrow wide shallow deep rough smooth sharp dull sweet bitter salty fresh
dusty clean proud humble brave calm eager famous fancy fragile happy hollow honest jolly kind
lively loyal massive mellow nervous noble odd plain polite quick rare royal rusty secret shiny shy
sleepy slow solid steady strange strict sturdy tame tender thick thin tiny vast vivid warm weary
wild wise young
""".split()
NOUNS = """
river mountain forest village garden harbor bridge tower castle island desert valley meadow lake
ocean beach cave cliff road market station museum library school church office factory hotel
theater kitchen window letter story song picture journey season winter summer morning evening
weather storm cloud rain snow wind shadow stone metal paper glass wood water fire earth light
sound voice question answer reason moment minute century history future science music language
number pattern circle corner center border branch root seed leaf flower fruit grain horse sheep
wolf eagle owl bee spider whale shark tiger lion bear engine machine tool signal message report
meeting project budget plan table team group member leader visitor neighbor stranger child parent
friend doctor captain soldier merchant
""".split()
VERBS = """
crossed followed watched described repaired painted carried visited discovered forgot remembered
mentioned opened closed measured counted collected sorted cleaned borrowed returned moved studied
drew ignored praised guarded noticed reached left
""".split()
COMMON = """
the of and to in is it you that he was for on are with as his they be at one have this from or had
by but some what there we can out other were all your when up use how said an each she which do
their time if will way about many then them would write like so these her long make thing see him
two has look more day could go come did no most people over know than call first who may down side
been now find any new work part take get place made live where after back little only round man
year came show every good me give our under name very through just form much great think say help
low line before turn cause same mean differ move right boy old too does tell sentence set three
want air well also play small end put home read hand port large spell add even land here must big
high such follow act why ask men change went light kind off need house try us again point world
near build self earth father head stand own page should country found answer grow still learn
plant cover food sun four thought let keep eye never last door between city tree cross since hard
start might saw far sea left late run don while press close night real life few stop open seem
next white begin got walk example ease both mark often until mile feet care second enough girl
usual ready above ever red list though feel talk bird soon body family direct leave color face
question document sum value key number total price order customer email address date note please
thank text file data user error time system report result item amount account payment invoice
contract section chapter page table summary office company manager team client service product
week month today tomorrow yesterday minute hour street room
""".split()
TOPICS = {
    "lunch": FOODS,
    "pet": PETS,
    "music": INSTRUMENTS,
    "city": CITIES,
    "color": COLORS,
    "day": DAYS,
    "month": MONTHS,
    "job": JOBS,
}
COMMON = """
the a this that these some any every all no one two many most other another such what which who it
they we you I he she he is are was were be been has have had do does did will would can could
should may might must not and or but so because while when where how if then than as of in on at
to from with without for by about over under after before between into through during against
again also always never often still only just even very too quite rather much more less well here
there now soon later once twice today yesterday people person man woman child friend family group
team company city town country world place home room time day week month year hour moment life
work job thing part way case point fact idea problem question answer reason result example number
line page text word name list note report plan offer rule test model small large big little great
good better best bad new old young long short high low early late easy hard full empty open free
true right wrong clear ready sure own same different important possible make made take took give
gave get got go went come came see saw know knew think thought say said tell told ask asked find
found keep kept let put set use used need want like look help start stop try show read write wrote
written learn play move live believe bring happen hold stand run turn follow change lead
understand watch speak spend grow win send build fall cut reach remember consider appear buy wait
serve die expect stay carry draw choose explain add below above inside outside near far away back
up down off out together
""".split()
CLASSIC_NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s st t tr v w z".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = "l n r s t m nd rk x".split() + ["", "", ""]


def invented(rng: Random) -> str:
    """A made-up capitalised word of two or three syllables: a name no word list holds."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((2, 2, 2, 2, 3)))
    ).capitalize()


def digits(rng: Random, count: int) -> str:
    """A number of exactly `count` digits, the first one not zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def distinct(make, count: int) -> list:
    """`count` different values of `make()` in the order they came."""
    seen, out = set(), []
    while len(out) < count:
        value = make()
        if value not in seen:
            seen.add(value)
            out.append(value)
    return out


def people(rng: Random, count: int, taken: list[str] = ()) -> list[str]:
    """Different names, none of `taken`: first names while they last, first names with a surname,
    and made-up ones. Who is called by the first name alone shares it with nobody.
    """
    whole, alone = set(taken), {name for name in taken if " " not in name}
    shared, out = {name.split()[0] for name in taken}, []
    while len(out) < count:
        kind = rng.random()
        first = rng.choice(NAMES) if kind < 0.7 else invented(rng)
        name = f"{first} {rng.choice(SURNAMES)}" if 0.4 <= kind < 0.7 else first
        if name in whole or first in alone or (name == first and first in shared):
            continue
        whole.add(name)
        shared.add(first)
        if name == first:
            alone.add(name)
        out.append(name)
    return out


def prose(rng: Random, sentences: int) -> str:
    """Make sentences of random words, in place of a user's other text: they answer nothing and
    ask nothing.
    """

    def word() -> str:
        kind = rng.random()
        if kind < 0.7:
            return rng.choice(COMMON)
        return (
            rng.choice(rng.choice((NOUNS, ADJECTIVES, VERBS, ITEMS)))
            if kind < 0.9
            else invented(rng)
        )

    out = []
    for _ in range(sentences):
        words = [word() for _ in range(rng.randint(3, 14))]
        if len(words) > 6 and rng.random() < 0.3:
            words[len(words) // 2] += ","
        text = " ".join(words)
        out.append(text[0].upper() + text[1:] + rng.choice("...:!"))
    return " ".join(out)


def filler(rng: Random) -> str:
    """One sentence that states no fact any task asks for."""

    def the() -> str:
        return (
            f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            if rng.random() < 0.6
            else f"the {rng.choice(NOUNS)}"
        )

    kind = rng.randrange(5)
    if kind == 0:
        text = f"{the()} {rng.choice(VERBS)} {the()}."
    elif kind == 1:
        text = (
            f"in the {rng.choice(('morning', 'evening', 'winter', 'summer'))}, {the()} was "
            f"{rng.choice(ADJECTIVES)}."
        )
    elif kind == 2:
        text = f"nobody {rng.choice(VERBS)} {the()} near {the()}."
    elif kind == 3:
        text = (
            f"it was a {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}, and {the()} "
            f"{rng.choice(VERBS)} it."
        )
    else:
        text = f"we {rng.choice(VERBS)} {the()} before {the()} {rng.choice(VERBS)} {the()}."
    return text[0].upper() + text[1:]
