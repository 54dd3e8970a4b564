"""Common English words, chosen for this package: keys of needles, and the lists of the word-counting tasks."""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    able acid active agile alert amber ample ancient angry arctic basic bitter blank blunt bold brave brief bright
    brisk broad bronze busy calm careful cheap civil clean clear clever cloudy coarse common complex content cool
    coral crisp cruel curious curly daily damp daring dark deep dense direct distant dizzy double dry dull dusty
    eager early easy elder elegant empty equal exact faint fair famous fancy fast fierce final fine firm fit flat
    fluffy foggy formal fragile frank fresh friendly frozen full funny fuzzy gentle giant glad golden grand grave
    greasy green grey happy hard harsh hasty heavy hollow honest huge humble hungry icy ideal idle jolly keen kind
    large late lazy lean level light liquid little lively local lonely long loose loud lovely loyal lucky major
    marble massive mellow mild minor misty modern modest moist muddy narrow natural neat nervous new nimble noble
    noisy normal odd old open orange oval pale patient perfect plain pleasant polite poor pretty private proud
    pure purple quaint quick quiet rapid rare raw ready regular rich rigid ripe robust rough round royal rural
    rusty sad safe salty sandy scarce secret serious shallow sharp shiny short shy silent silky silver simple
    single sleepy slim slow small smart smooth soft solar solid sour spare spicy square stable stale steady steep
    stern sticky stiff still stormy strange strict strong sturdy subtle sunny sweet swift tall tame tart tender
    thick thin tidy timid tiny tired tough tranquil true twin urban useful usual vague vain vast velvet vivid warm
    wary weak weary wet whole wide wild windy wise witty wooden worthy young zesty
    """
)
NOUNS = _words(
    """
    acorn actor airport anchor ankle answer apple apron arch arrow artist atlas attic author autumn axle bakery
    balcony balloon bamboo banana banjo banner barn barrel basin basket beach beacon bean beard beaver bell bench
    berry bicycle bishop blanket blossom boat bonnet book boot bottle bowl branch bread brick bridge broom brother
    bucket button cabin cable cactus camel camera canal candle canoe canvas captain caravan carpet carrot castle
    cattle cave cedar cello chain chair chapel cherry chimney circle circus citizen city clay cliff clock cloth
    cloud clover coast coat cobbler coffee coin collar comet compass copper cotton cousin cradle crater crayon
    creek crown crystal cupboard curtain cushion cymbal dagger daisy dancer dawn deer desert desk diamond diary
    dinner doctor dolphin donkey door dragon drawer dream dress drum eagle easel echo elbow elephant elm engine
    envelope evening fabric falcon farmer feather fence fern ferry festival fiddle field finch finger fire flag
    flame flask flower flute forest fork fossil fountain fox frame galaxy gallery garden garlic gate geyser ginger
    giraffe glacier glove goat grape grass gravel guitar hammer hammock harbour harp hat hawk hazel hedge helmet
    heron hill hinge honey horizon horse hotel house hut igloo inlet iris island ivory ivy jacket jar jasmine
    jewel journal judge jug jungle kettle key king kitchen kite kitten knee knight knot ladder lagoon lake lamp
    lantern laurel lawn leaf lemon letter library lily lion lizard locket loom lumber lute magnet mango maple map
    market mast meadow medal melon meteor mill mint mirror mitten monk monkey moon moss motor mountain mouse
    museum mushroom napkin needle nest net night nurse oak oasis ocean olive onion orchard otter oven owl oyster
    paddle palace palm panda paper parade parrot pasture path peach peacock pear pebble pelican pencil pepper
    piano pickle picnic pigeon pillar pillow pine pirate planet plate plum pocket poet pond poppy porch portrait
    potato pottery prairie prince puddle pumpkin puppet puzzle pyramid quarry queen quill quilt rabbit radio
    radish raft rail rain ranch raven ribbon rice ridge ring river road robin rocket roof root rope rose ruby rug
    saddle sailor salad salmon sand satchel sauce saw scarf school scissors sculptor seal seed shadow sheep shelf
    shell ship shoe shop shovel sister sketch skirt sky sled slipper snail snow soap sock soldier song soup spark
    sparrow spider spoon spring squirrel stable stage staircase star statue stove straw stream street summer sun
    swan table tailor tambourine tea teacher temple tent theatre thicket thimble thistle thorn thread throne
    thunder tiger timber toast tomato torch tower toy train tray treasure tree trout truck trumpet tulip tunnel
    turnip turtle twig umbrella uncle valley vase vessel vest village vine violin volcano wagon waiter walnut
    walrus wardrobe water wave weaver whale wheat wheel whistle willow window wing winter wolf woodpecker wool
    yacht yard yarn zebra zipper
    """
)
VERBS = _words(
    """
    accept achieve admire admit adopt advise agree allow amuse appear apply argue arrange arrive ask attend avoid
    bake balance bargain bathe become beg begin believe belong bend blame boil borrow bounce breathe bring build
    bury buy call carry carve catch cause celebrate change chase cheer choose chop clap climb close collect
    combine compare complain compose confess confirm connect consider contain continue copy count cover cross cry
    dance decide declare decorate defend deliver demand deny depend describe deserve destroy develop dig disagree
    discover discuss divide dive draw drift drink drive earn eat enjoy enter escape examine exist expand expect
    explain explore fail fall fasten feed feel fetch fill find finish float fold follow forget forgive gather give
    glance grow guess guide happen hear help hesitate hide hold hope hurry imagine improve include inform insist
    invent invite join jump keep kneel knit know laugh launch lead learn leave lend listen live manage march marry
    measure melt mend mention mix move need notice obey obtain occur offer order owe own paint permit persuade
    pick plan play point polish pour praise pray prefer prepare pretend prevent promise pronounce propose protect
    prove provide publish pull push realise receive recite recognise recommend refuse remain remember remind
    remove repair repeat reply rescue resist return reveal ride rise roam run sail scatter search select sell send
    separate serve sew shout show sing sit skate sleep slide smile sneeze solve speak spend spill spread stand
    stare steal stretch study succeed suffer suggest support surprise surround swallow swim swing talk taste teach
    tell thank think throw touch translate travel tremble trust try understand unite visit wait wake walk wander
    warn wash watch welcome whisper win wish wonder worry write yawn yield
    """
)
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS, *VERBS}))
FIRST_NAMES = _words(
    """
    Ada Albert Alma Arthur Beatrice Bernard Cecil Clara Conrad Daphne Dora Edgar Edith Elias Esther Felix Flora
    Gilbert Greta Harold Helena Hugo Ida Irene Jasper Josephine Julius Leonora Lionel Mabel Magnus Matilda Nora
    Oscar Ottilie Percy Ralph Rosalind Rupert Selma Silas Sybil Theodore Ursula Victor Wanda Winifred
    """
)
LAST_NAMES = _words(
    """
    Abbott Ashdown Barrow Bexley Blackwood Bramble Calloway Carver Chandler Coldridge Dunmore Eastman Fairfax
    Farrow Fenwick Garland Greaves Hawthorne Holloway Ingram Kestrel Lockwood Marlowe Merrick Norwood Oakley
    Pemberton Prescott Quimby Radcliffe Redfern Sallow Sedgwick Shelby Stanhope Tennant Thorpe Underhill Vane
    Wakefield Whitlock Winslow Wycliffe Yardley
    """
)
PLACES = _words(
    """
    archive bakery boathouse cellar chapel clinic dairy depot foundry gallery garage granary gymnasium hangar
    hospital infirmary kennel laboratory laundry library lodge mill museum nursery observatory office orchard
    pantry pavilion printery quarry refectory registry school stable studio tannery theatre vault warehouse
    workshop yard
    """
)
TRADES = _words(
    """
    accountant architect baker binder botanist brewer carpenter clerk cobbler conductor curator dentist editor
    engraver examiner fiddler gardener geologist glazier guide instructor jeweller keeper librarian mason miller
    notary organist painter pharmacist pilot plumber porter potter printer saddler sculptor surgeon surveyor
    tailor tutor weaver
    """
)


def pair(rng: Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
